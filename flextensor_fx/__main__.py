"""`python -m flextensor_fx` is the command `flextensor-fx`."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
