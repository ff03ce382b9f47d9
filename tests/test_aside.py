"""What lies before a mark is read without waiting for what follows it."""

import pytest
import torch

from trainer.aside import Aside


def test_on_a_cpu_nothing_is_under_way() -> None:
    aside, numbers = Aside(torch.device("cpu")), torch.arange(3)
    aside.mark()
    with aside.reading():
        assert numbers.tolist() == [0, 1, 2]


@pytest.mark.gpu
def test_reading_waits_for_the_mark_and_not_for_the_device() -> None:
    aside = Aside(torch.device("cuda"))
    main = torch.cuda.current_stream()

    def total(numbers: torch.Tensor) -> float:
        return numbers[numbers > 0].sum().item()

    warm = torch.ones(1000, device="cuda").cumsum(0)
    aside.mark()
    with aside.reading():  # kernels that are loaded and memory that is taken while the device is busy may wait for it
        total(warm)
    for number in range(1, 4):
        torch.cuda._sleep(50_000_000)  # the numbers are not there yet when the host gets to the reading
        numbers = torch.full((1000,), float(number), device="cuda").cumsum(0)
        aside.mark()
        torch.cuda._sleep(500_000_000)
        with aside.reading():
            assert total(numbers) == number * 1000 * 1001 / 2
        assert not main.query()
        assert torch.cuda.current_stream() == main
        torch.cuda.synchronize()
