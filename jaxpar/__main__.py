"""`python -m jaxpar`: the same as the command `jaxpar`."""

from jaxpar.cli.main import main

main()
