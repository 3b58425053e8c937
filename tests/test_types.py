"""Tests that users' type checkers see the types of the public names."""

import inspect
import pathlib
import typing

from absl.testing import absltest
from absl.testing import parameterized
import towers

PACKAGE = pathlib.Path(towers.__file__).resolve().parent

# What is public: `towers`, and its modules whose names are used with theirs.
MODULES = (
    "towers",
    "towers.checkpoints",
    "towers.cluster",
    "towers.export",
    "towers.hooks",
    "towers.inspection",
    "towers.metrics",
    "towers.precise_batch_norm",
    "towers.verification",
)


def resolve(name):
  return getattr(towers, name.partition(".")[2]) if "." in name else towers


def functions_of(module):
  """Yields (name, function) of what users may call in `module`."""
  for name, value in vars(module).items():
    if name.startswith("_"):
      continue
    if inspect.isfunction(value) and value.__module__.startswith("towers."):
      yield name, value
    elif inspect.isclass(value) and value.__module__.startswith("towers."):
      yield from methods_of(value)


def methods_of(cls):
  """Yields (name, function) of the methods and properties that `cls` defines.

  Those of a base class of ours that is private are its own.
  """
  for base in cls.__mro__:
    if not base.__module__.startswith("towers."):
      continue
    for name, member in vars(base).items():
      member = getattr(member, "__func__", member)  # Of class methods.
      member = getattr(member, "fget", member)  # Properties.
      member = getattr(member, "func", member)  # Cached properties.
      # What `NamedTuple` makes stands in no file of ours.
      if inspect.isfunction(member) and (
          name == "__init__" or not name.startswith("_")):
        yield f"{cls.__name__}.{name}", member


def untyped(function):
  """Returns the parameters of `function` that have no type; or "return"."""
  signature = inspect.signature(function)
  missing = [name for name, parameter in signature.parameters.items()
             if parameter.annotation is parameter.empty and name not in (
                 "self", "cls")]
  if signature.return_annotation is signature.empty and (
      function.__name__ != "__init__"):
    missing.append("return")
  return missing


class TypesTest(parameterized.TestCase):

  @parameterized.named_parameters((name, name) for name in MODULES)
  def test_all_that_users_call_is_typed(self, name):
    found = dict(functions_of(resolve(name)))
    self.assertNotEmpty(found)
    for called, function in found.items():
      with self.subTest(called):
        self.assertEmpty(untyped(function))

  @parameterized.named_parameters((name, name) for name in MODULES)
  def test_this_python_can_read_the_types(self, name):
    """They may be text, which nobody reads until a type checker does."""
    for called, function in functions_of(resolve(name)):
      with self.subTest(called):
        self.assertCountEqual(
            typing.get_type_hints(function), function.__annotations__)

  def test_type_checkers_are_told(self):
    """Without this file they take an installed package for untyped."""
    self.assertEqual((PACKAGE / "py.typed").read_bytes(), b"")


class ChecksTest(absltest.TestCase):

  def test_finds_what_has_no_type(self):

    def function(typed: int, untyped_one, *rest, keyword=1):
      del typed, untyped_one, rest, keyword

    self.assertEqual(untyped(function),
                     ["untyped_one", "rest", "keyword", "return"])

  def test_finds_methods_properties_and_functions(self):
    names = dict(functions_of(towers))
    self.assertIn("build_towers", names)
    self.assertIn("TowerGraph.minimize", names)
    self.assertIn("TowerGraph.__init__", names)
    self.assertIn("Tower.collection", names)
    self.assertIn("StopOnNanHook.after_run", dict(functions_of(towers.hooks)))


if __name__ == "__main__":
  absltest.main()
