"""`dspark` with the fake engine, as a process of its own: tests kill it and send it signals."""

import os
from functools import partial

from dspark_cli import backend, main
from tests.cli import fake

backend.locate_checkpoint = fake.locate
backend.load_tokenizer = lambda folder: fake.FakeTokenizer()
backend.check_checkpoints = lambda config: None
backend.load_engine = partial(fake.FakeEngine, delay=float(os.environ.get("FAKE_DELAY", "0")))
main.run()
