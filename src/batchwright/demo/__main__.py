"""A process of a demo: `python -m batchwright.demo MODULE FUNCTION ARGUMENTS` calls a function with JSON arguments.

It ends with the process that started it.
"""

import json
import os
import signal
import sys
from importlib import import_module

from batchwright.base.machine import die_with_parent

if __name__ == "__main__":
    die_with_parent(os.getppid())
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C reaches this process too; the one that started it prints
    module, function, arguments = sys.argv[1:]
    getattr(import_module(module), function)(**json.loads(arguments))
