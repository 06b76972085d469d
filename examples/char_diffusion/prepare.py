"""Make batches until Ctrl-C: `python prepare.py config/train_char_diffusion.py`, the same as `batchwright prepare`."""

import sys

from batchwright.cli.main import main

sys.exit(main(["prepare", *sys.argv[1:]]))
