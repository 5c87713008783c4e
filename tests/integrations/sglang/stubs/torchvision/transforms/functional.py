from torchvision._missing import __getattr__

__all__ = ["__getattr__"]
