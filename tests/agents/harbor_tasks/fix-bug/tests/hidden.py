import pytest
from stats import median


@pytest.mark.parametrize(("values", "middle"), [([3, 1, 2], 2), ([4, 1, 2, 3], 2.5), ([7], 7)])
def test_median(values, middle):
    assert median(values) == middle
