"""`dspark` with the fake engine, as a process of its own: tests kill it and send it signals."""

from dspark_cli import main, replicas
from tests.cli import fake

fake.install()
replicas.MAIN = "tests.cli.fake:replica"
main.run()
