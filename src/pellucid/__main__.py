"""``python -m pellucid`` is the ``pellucid`` command."""

from pellucid.cli.main import run

if __name__ == "__main__":
    run()
