"""Memory does not grow with the number of rows."""

import subprocess
import sys

_SCRIPT = """
import sys
from engine import Engine, EngineConfig, Request, SamplingParams
engine = Engine(EngineConfig(model="demo", draft="demo", device="cpu", threads=1,
                             kv_cache_memory_bytes=32 << 20, max_model_len=512, verify="all"))
def rows():
    for i in range(350):
        ids = tuple(8 + (i * 31 + j * 7) % 900 for j in range(20 + i % 250))
        yield Request(request_id=str(i), prompt_token_ids=ids, params=SamplingParams(max_tokens=3))
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4 // 1024
at = [resident() for k, _ in enumerate(engine.run(rows())) if k in (149, 349)]
print(at[1] - at[0])
"""


def test_memory_does_not_grow_with_the_rows() -> None:
    """It grew by 90 KB a row: one compiled product was kept for every prompt length."""
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT], capture_output=True, text=True, check=True
    )
    # rows 150 to 249 have lengths of their own
    assert int(done.stdout) < 25, f"{done.stdout} MB more after 200 rows"
