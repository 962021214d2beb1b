import importlib
import pkgutil

import horoplug

for module in pkgutil.walk_packages(horoplug.__path__, "horoplug.", onerror=lambda name: None):
    if module.name.endswith("__main__") or ".libhoroplug" in module.name:
        continue
    try:
        importlib.import_module(module.name)
    except ImportError as error:
        missing = (error.name or "").split(".")[0]
        assert missing != "horoplug" or "pip install" in str(error), (module.name, error)
print("imported")
