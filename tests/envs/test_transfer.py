"""Numbers cross over unchanged; test_device_reads.py counts how often, and on a GPU who waits."""

import pytest
import torch

from esper_lightning.envs.actions import relevance
from esper_lightning.envs.transfer import download, send, upload
from tests.decisions import CPU

GPU = torch.device("cuda", 0)


def test_on_the_cpu_a_tensor_is_there_already() -> None:
    tensor = torch.arange(3.0)

    assert send(tensor, CPU) is tensor
    assert download(tensor) is tensor
    assert upload([1, 2], CPU).tolist() == [1, 2]
    assert upload([1, 2], CPU, torch.float64).dtype == torch.float64


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_numbers_come_back_from_a_gpu_as_they_went() -> None:
    rows = torch.randn(5, 7).t()  # not contiguous
    for tensor in (rows, rows > 0.0, torch.arange(12), torch.zeros(0, 3)):
        there = send(tensor, GPU)
        back = download(there)

        assert there.device == GPU and back.device == CPU
        assert torch.equal(back, tensor)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_download_waits_for_what_is_queued_before_it() -> None:
    x = torch.ones(2048, 2048, device=GPU)
    for _ in range(50):
        x = x @ x / 2048.0

    assert torch.equal(download(x), torch.ones(2048, 2048))


def test_the_table_of_relevance_is_made_once_and_serves_training_wherever_it_was_first_asked_for() -> None:
    relevance.cache_clear()
    with torch.inference_mode():
        table = relevance(CPU)

    assert relevance(CPU) is table and not table.is_inference()
