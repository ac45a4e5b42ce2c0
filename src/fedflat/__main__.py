"""Entry point of ``python -m fedflat``."""

from fedflat.cli import main

if __name__ == "__main__":
    main()
