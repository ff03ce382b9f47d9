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
    warm = torch.zeros(1000, device="cuda").cumsum(0)
    warm[warm > 0].sum().item()  # a kernel that is loaded while the device is busy may wait for it
    for number in range(3):
        torch.cuda._sleep(50_000_000)  # the numbers are not there yet when the host gets to the reading
        numbers = torch.full((1000,), float(number), device="cuda").cumsum(0)
        aside.mark()
        torch.cuda._sleep(500_000_000)
        with aside.reading():
            assert numbers[numbers > 0].sum().item() == number * 1000 * 1001 / 2
        assert not main.query()
        assert torch.cuda.current_stream() == main
        torch.cuda.synchronize()
