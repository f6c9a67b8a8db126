"""The array type that counts, places and lengths have everywhere."""

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
