"""The command line: one thin file a command. Arguments and config come first; JAX is imported when they are known to be good."""
