"""torch.compile for the layers of a model that is trained."""

from transformers import PreTrainedModel

from distflow.model import attention


def compile_layers(model: PreTrainedModel) -> None:
    """Lets torch make kernels of each layer, for any number of tokens. Attention stays what it is."""
    attention.leave_uncompiled()
    names = set(getattr(model, "_no_split_modules", None) or ())
    for layer in (m for m in model.modules() if type(m).__name__ in names):
        layer.compile(dynamic=True)
