"""A stand-in for torchvision, which does not import beside a CPU build of torch 2.13.0: what SGLang imports of it."""

__version__ = "0.0.0"
