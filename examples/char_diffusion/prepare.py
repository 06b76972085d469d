"""Make batches until Ctrl-C: `python prepare.py config/train_char_diffusion.py`, the same as `penstock prepare`."""

import sys

from penstock.cli.main import main

sys.exit(main(["prepare", *sys.argv[1:]]))
