"""`python -m alchemi_dist.cli`, for launchers that start Python."""

from alchemi_dist.cli import app

if __name__ == "__main__":
    app()
