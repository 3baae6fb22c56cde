"""`python -m thresher`: the command line."""

from thresher.cli import main

main()
