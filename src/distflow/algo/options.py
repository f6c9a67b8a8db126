"""The choices and limits of constants of algorithms. Imports no torch: flows are planned without it."""

from typing import Annotated, Literal

from pydantic import Field

Aggregation = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]
Baseline = Literal["mean", "leave_one_out", "length_weighted"]
CorrectionKind = Literal["token", "sequence", "mask-token", "mask-sequence", "icepop-token", "icepop-sequence"]
Estimator = Literal["k1", "k2", "k3"]
GroupScale = Literal["std", "none"]  # of one group, without the rest of the batch
Scale = Literal["std", "none", "batch", "nonzero_std"]

Count = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
NonNegative = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
Smoothing = Annotated[float, Field(ge=0, lt=0.5)]
Threshold = Annotated[float, Field(ge=1)]
