import numpy as np
from numpy.typing import NDArray

def copy_batch(dst: NDArray[np.int64], src: NDArray[np.int64], sizes: NDArray[np.int64], /) -> None: ...
