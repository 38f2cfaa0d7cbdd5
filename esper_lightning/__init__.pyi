from esper_lightning.evaluation.checkpoints import load_controller as load_controller

__all__ = ["load_controller"]
