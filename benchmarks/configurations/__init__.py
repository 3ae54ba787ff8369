"""The programs that are recorded on a card: plain PyTorch, which knows nothing of who records or predicts it.

`catalogue` lists them, with no import of torch; `Configuration.load` builds one. The other modules hold the models.
"""

from configurations.catalogue import ALL, CONFIGURATIONS, Configuration, Precision

__all__ = ["ALL", "CONFIGURATIONS", "Configuration", "Precision"]
