from esper_lightning.evaluation.checkpoints import load_controller as load_controller

__version__: str

__all__ = ["__version__", "load_controller"]
