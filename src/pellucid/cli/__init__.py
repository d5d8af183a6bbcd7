"""The command line: the only place where everything meets. One file a verb, heavy imports inside."""
