"""The choices and limits of constants of algorithms. Imports no torch: flows are planned without it."""

from typing import Annotated, Literal

from pydantic import Field

Aggregation = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]
AggregateBy = Literal["sample", "branch"]
Baseline = Literal["mean", "leave_one_out", "length_weighted"]
BestOfBaseline = Literal["without", "mean"]
CorrectionKind = Literal["token", "sequence", "mask-token", "mask-sequence", "icepop-token", "icepop-sequence"]
Divergence = Literal["forward", "reverse", "jensen_shannon"]
Estimator = Literal["k1", "k2", "k3", "k3+"]
GroupScale = Literal["std", "mean", "none"]  # of one group, without the rest of the batch
KLReference = Literal["reference", "ema"]
PreferenceKind = Literal["sigmoid", "sigmoid_norm", "robust", "hinge", "ipo"]
TeacherKind = Literal["teacher", "ema"]
RejectionKind = Literal[
    "token-k1", "token-k2", "token-k3",
    "mean-k1", "mean-k2", "mean-k3",
    "sum-k1", "sum-k2", "sum-k3",
    "max-k1", "max-k2", "max-k3",
]  # fmt: skip
Scale = Literal["std", "mean", "none", "batch", "nonzero_std"]

Count = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
NonNegative = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
PositiveCount = Annotated[int, Field(gt=0)]
Share = Annotated[float, Field(gt=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Smoothing = Annotated[float, Field(ge=0, lt=0.5)]
Threshold = Annotated[float, Field(ge=1)]
