"""Tests for tools.api_reference."""

import importlib.util
import pathlib
import sys
import types
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import towers

from tools import api_reference
from tools import command_line


class NamesTest(parameterized.TestCase):

  def test_modules_are_those_that_users_import(self):
    modules = api_reference.public_modules()
    self.assertIs(modules[0], towers)
    self.assertIn(towers.checkpoints, modules)
    self.assertNotIn("towers.lockstep", [m.__name__ for m in modules])

  def test_finds_docstrings_of_functions_classes_and_methods(self):
    found = dict(api_reference.docstrings(towers))
    self.assertIn("Builds `model_fn`", found["towers.build_towers"])
    self.assertIn("one step of training", found["towers.TowerGraph.minimize"])
    self.assertIn("verify(model_fn",
                  dict(api_reference.docstrings(
                      towers.verification))["towers.verification"])

  @parameterized.named_parameters(
      ("none", "See `merge`.", []),
      ("function", "See `towers.merge`.", []),
      ("call", "See `towers.merge(fn, x)`.", []),
      ("method", "See `towers.TowerGraph.minimize`.", []),
      ("in_module", "See `towers.hooks.TraceHook`.", []),
      ("gone", "See `towers.mirge` and `towers.hooks.Nothing`.",
       ["towers.mirge", "towers.hooks.Nothing"]),
  )
  def test_unknown_names(self, text, expected):
    self.assertEqual(api_reference.unknown_names(text), expected)

  def test_docstrings_of_the_package_mention_what_there_is(self):
    api_reference.check()

  def test_refuses_a_docstring_that_mentions_what_there_is_not(self):
    module = types.ModuleType("odd", "Uses `towers.gone`.")
    with mock.patch.object(api_reference, "public_modules", lambda: [module]):
      with self.assertRaisesRegex(command_line.UsageError,
                                  "docstring of odd mentions towers.gone"):
        api_reference.check()


class WriteTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.output = pathlib.Path(self.create_tempdir().full_path) / "api"

  def need_pdoc(self):
    if importlib.util.find_spec("pdoc") is None:
      self.skipTest("pdoc is not installed (extra `docs`).")

  def test_says_what_to_install(self):
    with mock.patch.dict(sys.modules, {"pdoc": None}):
      with self.assertRaisesRegex(command_line.UsageError, r"\[docs\]"):
        api_reference.write(self.output)

  def test_writes_a_page_for_each_public_module(self):
    self.need_pdoc()
    self.assertEqual(
        api_reference.main(["api_reference", f"--output={self.output}"]), 0)
    page = (self.output / "towers.html").read_text(encoding="utf-8")
    for name in towers.__all__:
      self.assertIn(f'id="{name}"', page)
    for module in api_reference.public_modules()[1:]:
      name = module.__name__.rpartition(".")[2]
      self.assertTrue((self.output / "towers" / f"{name}.html").exists())

  def test_a_warning_is_an_error(self):
    self.need_pdoc()
    with mock.patch.object(towers, "__all__", (
        *towers.__all__, "gone")), mock.patch.object(api_reference, "check"):
      with self.assertRaisesRegex(command_line.UsageError, "pdoc warns"):
        api_reference.write(self.output)


if __name__ == "__main__":
  absltest.main()
