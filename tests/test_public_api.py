"""Tests that the public names are the ones we promise, and who imports whom."""

import ast
import inspect
import pathlib
import sys

from absl.testing import absltest
from absl.testing import parameterized
import towers

ROOT = pathlib.Path(__file__).resolve().parent.parent
PACKAGE = pathlib.Path(towers.__file__).resolve().parent

PUBLIC = (
    "AsyncTraining",
    "DynamicLossScale",
    "Moments",
    "PerTower",
    "Tower",
    "TowerGraph",
    "TowerSpec",
    "all_gather",
    "all_reduce",
    "batch_norm",
    "build_towers",
    "current_tower",
    "merge",
    "moments",
    "no_sync",
)

# Modules whose names are used as `towers.module.Name`.
PUBLIC_MODULES = ("checkpoints", "cluster", "export", "hooks", "inspection",
                  "metrics", "precise_batch_norm", "verification")

# Each module may import only those that stand before it.
LAYERS = (
    "_keras",
    "_tensorflow",
    "devices",
    "inputs",
    "tower_names",
    "tower",
    "context",
    "lockstep",
    "placement",
    "local_variables",
    "packing",
    "replicas",
    "variables",
    "collectives",
    "metric_arguments",
    "metrics",
    "moments",
    "fused",
    "batch_norm",
    "conversion",
    "updates",
    "seeds",
    "gradients",
    "model_gradients",
    "outputs",
    "optimizers",
    "loss_scale",
    "accumulation",
    "train_step",
    "build",
    "asynchronous",
    "graph",
    "builder",
    "cluster_spec",
    "cluster_network",
    "cluster_facts",
    "cluster_notice",
    "cluster_talk",
    "cluster_session",
    "cluster_sync",
    "cluster",
    "moving_statistics",
    "precise_batch_norm",
    "step_stats",
    "hooks",
    "checkpoint_files",
    "checkpoint_names",
    "checkpoint_matching",
    "checkpoint_report",
    "checkpoint_targets",
    "checkpoint_plan",
    "checkpoints",
    "export_layout",
    "export_signature",
    "export_graph",
    "export",
    "graph_nodes",
    "scopes",
    "transfers",
    "findings",
    "lint_variables",
    "lint_losses",
    "lint",
    "report_text",
    "picture",
    "display_names",
    "display",
    "inspection",
    "verification_rules",
    "verification_compare",
    "verification_runs",
    "verification_random",
    "verification_causes",
    "verification_check",
    "verification_report",
    "verification",
    "__init__",
)
ALLOWED = {name: frozenset(LAYERS[:i]) for i, name in enumerate(LAYERS)}

# Our own limit: what comes after must be passed by its name.
MAX_POSITIONAL = 2

# What `setup.py` asks for, and nothing else, may be imported from outside.
REQUIREMENTS = ("absl", "numpy", "tensorflow")

POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY,
              inspect.Parameter.POSITIONAL_OR_KEYWORD)


def modules(folder):
  """Returns named parameters, one for each Python file in `folder`."""
  return [("_".join([folder.name, *path.relative_to(folder).parent.parts,
                     path.stem.strip("_")]), path)
          for path in sorted(folder.rglob("*.py"))]


def imported_names(tree):
  """Returns `tree`'s imports as (module, name) pairs; name may be None."""
  pairs = []
  for node in ast.walk(tree):
    if isinstance(node, ast.Import):
      pairs.extend((alias.name, None) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
      module = "." * node.level + (node.module or "")
      pairs.extend((module, alias.name) for alias in node.names)
  return pairs


def package_imports(pairs):
  """Returns which modules of `towers` the (module, name) `pairs` import."""
  imports = set()
  for module, name in pairs:
    if module == "towers" and name is not None:
      imports.add(name)
    elif module == "towers":
      imports.add("__init__")
    elif module.startswith("towers."):
      imports.add(module.split(".")[1])
  return imports


def is_named_tuple(cls):
  return issubclass(cls, tuple) and hasattr(cls, "_fields")


def public_callables():
  """Yields (name, function, is_method) of all that users may call."""
  for name in PUBLIC:
    value = getattr(towers, name)
    if not inspect.isclass(value):
      yield name, value, False
      continue
    for attribute, member in vars(value).items():
      if attribute.startswith("_") and attribute != "__init__":
        continue
      member = getattr(member, "fget", member)  # Properties.
      member = getattr(member, "func", member)  # Cached properties.
      if inspect.isfunction(member):
        yield f"{name}.{attribute}", member, True


class PublicNamesTest(parameterized.TestCase):

  def test_names_are_pinned(self):
    self.assertIsInstance(towers.__all__, tuple)
    self.assertEqual(towers.__all__, PUBLIC)

  def test_all_is_sorted(self):
    self.assertEqual(list(towers.__all__), sorted(towers.__all__))

  def test_nothing_else_is_public(self):
    """What is not private is promised, or is one of our own modules."""
    names = {name for name in vars(towers) if not name.startswith("_")}
    self.assertEmpty(names - set(PUBLIC) - set(LAYERS))

  @parameterized.named_parameters((name, name) for name in PUBLIC)
  def test_is_documented(self, name):
    doc = getattr(towers, name).__doc__ or ""
    # What `NamedTuple` writes where a class has no docstring of its own.
    self.assertNotEmpty(doc.strip())
    self.assertNotStartsWith(doc, f"{name}(")

  def test_version_is_text_that_setup_can_read(self):
    text = (PACKAGE / "__init__.py").read_text(encoding="utf-8")
    self.assertIn(f'\n__version__ = "{towers.__version__}"\n', text)

  def test_methods_are_documented(self):
    undocumented = [name for name, function, _ in public_callables()
                    if not name.endswith("__init__") and not function.__doc__]
    self.assertEmpty(undocumented)

  def test_options_are_keyword_only(self):
    """Constructors are exempt: a named tuple's fields have their order."""
    for name, function, is_method in public_callables():
      if name.endswith("__init__"):
        continue
      parameters = list(inspect.signature(function).parameters.values())
      positional = [p.name for p in parameters if p.kind in POSITIONAL]
      with self.subTest(name):
        self.assertLessEqual(len(positional[is_method:]), MAX_POSITIONAL,
                             f"positional: {positional}")

  def test_signatures_are_annotated(self):
    for name, function, is_method in public_callables():
      signature = inspect.signature(function)
      parameters = list(signature.parameters.values())[is_method:]
      missing = [p.name for p in parameters if p.annotation is p.empty]
      constructor = name.endswith("__init__")
      if signature.return_annotation is signature.empty and not constructor:
        missing.append("return")
      with self.subTest(name):
        self.assertEmpty(missing)

  def test_named_tuples_document_their_fields(self):
    for name in PUBLIC:
      value = getattr(towers, name)
      if inspect.isclass(value) and is_named_tuple(value):
        with self.subTest(name):
          for field in value._fields:
            self.assertRegex(value.__doc__, rf"`{field}`|\n +{field}: ")


class LayeringTest(parameterized.TestCase):

  def test_every_module_has_its_place(self):
    self.assertCountEqual([path.stem for path in PACKAGE.glob("*.py")], LAYERS)

  @parameterized.named_parameters(*modules(PACKAGE))
  def test_imports_point_one_way(self, path):
    pairs = imported_names(ast.parse(path.read_text(encoding="utf-8")))
    allowed = ALLOWED.get(path.stem, frozenset())
    with self.subTest("only_lower_modules"):
      self.assertContainsSubset(package_imports(pairs), allowed)
    with self.subTest("absolute"):
      self.assertEmpty([m for m, _ in pairs if m.startswith(".")])
    with self.subTest("modules_not_names"):
      if path.name != "__init__.py":  # It is there to name names.
        self.assertEmpty([m for m, _ in pairs if m.startswith("towers.")])
    with self.subTest("only_what_setup_asks_for"):
      tops = {module.split(".")[0] for module, _ in pairs}
      # Python 3.9 cannot tell its own modules; newer ones run this as well.
      standard = getattr(sys, "stdlib_module_names", tops - {"models", "tools"})
      self.assertContainsSubset(tops - set(standard),
                                {"towers", *REQUIREMENTS})

  @parameterized.named_parameters(
      *modules(ROOT / "models"), *modules(ROOT / "tools"))
  def test_models_and_tools_use_public_names_only(self, path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    with self.subTest("imports"):
      self.assertContainsSubset(package_imports(imported_names(tree)),
                                {"__init__"})
    with self.subTest("names"):
      used = {node.attr for node in ast.walk(tree)
              if isinstance(node, ast.Attribute)
              and isinstance(node.value, ast.Name)
              and node.value.id == "towers"}
      self.assertContainsSubset(used,
                                {*PUBLIC, *PUBLIC_MODULES, "__version__"})

  def test_private_modules_are_used_by_their_own_test_only(self):
    for path in sorted((ROOT / "tests").rglob("*.py")):
      imports = package_imports(
          imported_names(ast.parse(path.read_text(encoding="utf-8"))))
      with self.subTest(path.name):
        self.assertContainsSubset(
            {name for name in imports
             if name.startswith("_") and name != "__init__"},
            {path.stem.replace("test_", "_", 1)})


if __name__ == "__main__":
  absltest.main()
