"""Small values to the device and results back: memory that is used again keeps nobody's values."""

import pytest
import torch

from engine.runner.pending import Downloads, Landing, Pending
from engine.runner.uploads import Uploads

CUDA = pytest.param("cuda", marks=pytest.mark.gpu)


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_values_arrive_however_late_the_device_reads_them(device: str) -> None:
    """A hundred times what the memory holds, while the device is busy with something long."""
    uploads = Uploads(torch.device(device), num_bytes=1024)
    busy = torch.ones(64 if device == "cpu" else 4096, dtype=torch.float32, device=device)
    sent = []
    for i in range(400):
        if device == "cuda" and i % 50 == 0:
            matrix = busy[None].expand(4096, -1).contiguous()
            for _ in range(20):
                matrix = matrix @ matrix * 1e-4
        values = [1000 * i + k for k in range(i % 40)]
        sent.append((values, uploads.send_integers(values)))
        floats = torch.full((2, i % 7), float(i))
        sent.append((floats.tolist(), uploads.send(floats)))
    for values, there in sent:
        assert there.device.type == device
        assert there.tolist() == values


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_more_than_the_memory_holds_and_a_buffer_to_fill(device: str) -> None:
    uploads = Uploads(torch.device(device), num_bytes=256)
    many = list(range(1000))
    assert uploads.send_integers(many).tolist() == many
    assert uploads.send(torch.arange(1000.0)).tolist() == [float(x) for x in many]
    buffer = torch.full((6,), -1, device=device)
    assert uploads.send_integers([3, 1, 2], buffer).tolist() == [3, 1, 2]
    assert buffer.tolist() == [3, 1, 2, -1, -1, -1]


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_a_result_that_was_read_does_not_change_with_the_next_one(device: str) -> None:
    downloads, results = Downloads(), []
    source = torch.zeros(5, 3, dtype=torch.int64, device=device)
    for i in range(20):
        source.fill_(i)
        pending = [Pending(source, downloads, 4), Pending(source + 1, downloads)]
        source.fill_(-1)
        results.append((i, [p.wait() for p in pending]))
    for i, (first, second) in results:
        assert first.shape == (4, 3)
        assert (first == i).all()
        assert (second == i + 1).all()


def test_memory_of_many_shapes_is_let_go() -> None:
    """A draining batch whose rounds are not captured has a shape a request."""
    downloads = Downloads()
    for rows in range(1, 1000):
        there = torch.empty(rows, 2)
        downloads.give_back(Landing(there, there.numpy(), None))  # type: ignore[arg-type]
    assert len(downloads._free) <= 64
