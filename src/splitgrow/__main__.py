"""``python -m splitgrow`` is the command ``splitgrow``."""

from splitgrow.cli import main

if __name__ == "__main__":
    main()
