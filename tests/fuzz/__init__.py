"""A fuzzer of the command line: hostile values for every command, option, setting, component and file format."""
