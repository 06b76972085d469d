"""The command line: one file per verb, each with `SUMMARY`, `add_arguments(parser)` and `run(arguments)`."""
