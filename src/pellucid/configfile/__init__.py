"""Configurations: read from YAML or JSON, changed by ``a.b=c``, checked by type, explained in one line.

``Config``           base of every configuration: frozen, strict, unknown keys refused and the nearest named
``read_mapping``     a YAML or JSON file as a plain mapping, with YAML's traps closed
``apply_overrides``  ``["a.b=c", …]`` laid over a mapping
``to_yaml``          a configuration as text that reads back equal

>>> from pellucid.configfile import Config, apply_overrides
>>> class Optimizer(Config):
...     rate: float = 3e-4
>>> Optimizer.from_mapping(apply_overrides({}, ["rate=1e-3"])).rate
0.001
>>> Optimizer(rat=1e-3)
Traceback (most recent call last):
pellucid.errors.ConfigError: there is no key 'rat', did you mean 'rate'?
"""

from pellucid.configfile.base_config import MAX_BYTES, Config, apply_overrides, read_mapping, to_yaml

__all__ = ["MAX_BYTES", "Config", "apply_overrides", "read_mapping", "to_yaml"]
