import math

import pytest

from agentlightning.trainer.statistics import estimate, t_quantile_975


@pytest.mark.parametrize(
    ("degrees", "quantile", "tolerance"),
    [
        (1, 12.7062, 1e-3),
        (2, 4.3027, 1e-3),
        (3, 3.1824, 0.02),
        (9, 2.2622, 1e-3),
        (63, 1.9983, 1e-4),
    ],
)
def test_quantiles_of_student_t_agree_with_the_tables(
    degrees: int, quantile: float, tolerance: float
) -> None:
    assert t_quantile_975(degrees) == pytest.approx(quantile, abs=tolerance)


def test_an_interval_by_hand() -> None:
    # mean 2, standard deviation 1, n 10: 2 ± 2.2622 / sqrt(10)
    values = [2 - math.sqrt(0.9), 2 + math.sqrt(0.9)] * 5
    found = estimate(values)
    assert found.mean == pytest.approx(2)
    assert found.half_width == pytest.approx(2.2622 / math.sqrt(10), abs=1e-3)


def test_too_few_values_have_no_bounded_interval() -> None:
    assert math.isnan(estimate([]).mean)
    assert estimate([1.0]).high == math.inf
