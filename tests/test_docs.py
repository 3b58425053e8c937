"""Tests that the documentation holds: its code runs, its links lead somewhere.

Each page about migration has the code before and the code after. Both are run
as they stand, on one and on several devices, and their numbers are compared.
"""

import contextlib
import io
import pathlib
import re
import urllib.parse
from xml.etree import ElementTree

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np
import tensorflow.compat.v1 as tf

import test_public_api
import towers

ROOT = pathlib.Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
TOLERANCE = 1e-5

# Losses of float32 that differ by more than this are of different models.
DIFFERENT = 2e-4


def has_tf_layers():
  try:
    return tf.layers.Dense is not None
  except AttributeError:  # "`Dense` is not available with Keras 3."
    return False


def blocks(page, heading=None, language="python"):
  """Returns the code blocks of a page, or of one of its sections."""
  text = (DOCS / page).read_text(encoding="utf-8")
  if heading is not None:
    text = re.search(rf"^## {heading}\n(.*?)(?=^## |\Z)", text,
                     re.MULTILINE | re.DOTALL).group(1)
  return re.findall(rf"^```{language}\n(.*?)^```$", text,
                    re.MULTILINE | re.DOTALL)


def run(source, towers_of_it=None, replaced=()):
  """Runs a code block in a graph of its own and returns its variables.

  Args:
    source: The code.
    towers_of_it: How many devices to put into its line `devices = [...]`.
    replaced: Pairs of texts, what to replace in the code and by what.
  """
  for old, new in replaced:
    if old not in source:
      raise ValueError(f"The code must hold {old!r}.")
    source = source.replace(old, new)
  if towers_of_it is not None:
    devices = [f"/cpu:{i}" for i in range(towers_of_it)]
    source, count = re.subn(r"^devices = .*$", f"devices = {devices}", source,
                            flags=re.MULTILINE)
    if count != 1:
      raise ValueError("The code must have one line `devices = ...`.")
  return execute(source, {"__name__": "__main__"})[0]


def execute(source, names):
  """Runs code in a graph of its own; returns its names and what it prints."""
  printed = io.StringIO()
  with tf.Graph().as_default(), contextlib.redirect_stdout(printed):
    code = compile(source, "<documentation>", "exec")
    exec(code, names)  # pylint: disable=exec-used
  return names, printed.getvalue()


class MigrationTest(parameterized.TestCase):
  """The numbers of each page, and what it says of them."""

  def setUp(self):
    super().setUp()
    if self.page == "tf_layers" and not has_tf_layers():
      self.skipTest("TensorFlow has no tf.layers without Keras 2.")

  @property
  def page(self):
    """The page that the test is named after."""
    names = [path.stem for path in (DOCS / "migrate").glob("*.md")]
    return next((name for name in names if name in self._testMethodName), None)

  def before(self, *arguments, **options):
    code, = blocks(f"migrate/{self.page}.md", "Before")
    return run(code, *arguments, **options)

  def after(self, *arguments, **options):
    code, = blocks(f"migrate/{self.page}.md", "After")
    return run(code, *arguments, **options)

  def check_equal(self, one, other, name="losses"):
    self.assertLen(one["losses"], 5)
    np.testing.assert_allclose(
        one[name], other[name], rtol=TOLERANCE, atol=TOLERANCE)

  def check_equal_variables(self, one, other):
    """Checks that all variables have the same names and values."""
    self.assertEqual(list(one["values"]), list(other["values"]))
    self.assertGreater(len(one["values"]), 4)
    for name, value in one["values"].items():
      np.testing.assert_allclose(
          value, other["values"][name], rtol=TOLERANCE, atol=TOLERANCE,
          err_msg=name)

  def check_different(self, one, other):
    difference = np.abs(np.subtract(one["losses"], other["losses"])).max()
    self.assertGreater(difference, DIFFERENT)

  def test_cifar10_tower_loop(self):
    one = self.before(1)
    for count in (1, 2, 3):
      after = self.after(count)
      self.check_equal(after, one)
      self.check_equal_variables(after, one)
    two = self.before(2)
    self.check_different(two, one)
    name = "moving_mean"
    difference = np.abs(two["values"][name] - one["values"][name]).max()
    self.assertGreater(difference, DIFFERENT)

  def test_cifar10_tower_loop_is_right_but_for_batch_norm(self):
    own = ("build_towers(model_fn, devices,",
           "build_towers(model_fn, devices, sync_batch_norm=False,")
    mean = ("[loss, train_op]", "[tf_mean_loss, train_op]")
    keep = ("pairs_of_towers.append(", "tower_losses.append(loss)\n      "
            "pairs_of_towers.append(")
    start = ("pairs_of_towers = []", "pairs_of_towers, tower_losses = [], []")
    total = ("config = tf.ConfigProto", "tf_mean_loss = "
             "tf.add_n(tower_losses) / len(devices)\nconfig = tf.ConfigProto")
    self.check_equal(self.after(2, replaced=[own]),
                     self.before(2, replaced=[mean, keep, start, total]))

  def test_cifar10_tower_loop_without_scope_counts_decay_twice(self):
    # Without batch norm, the loop on two devices has no other fault.
    plain = ("tf.nn.relu(batch_norm(x))", "tf.nn.relu(x)")
    scope = ('tf.get_collection("losses", scope)',
             'tf.get_collection("losses")')
    one = self.before(1, replaced=[plain])
    self.check_equal(self.after(2, replaced=[plain]), one)
    two = self.before(2, replaced=[plain, scope])
    self.assertGreater(two["losses"][0], 1.5 * one["losses"][0])

  def test_cifar10_tower_loop_refuses_an_odd_batch(self):
    odd = [("size=[12,", "size=[13,"), ("np.arange(12)", "np.arange(13)")]
    with self.assertRaisesRegex(ValueError, "evenly"):
      self.before(2, replaced=odd)
    self.check_equal(self.after(2, replaced=odd), self.after(1, replaced=odd))

  def test_slim_model_deploy(self):
    one = self.before(1)
    for count in (1, 2, 3):
      after = self.after(count)
      self.check_equal(after, one)
      self.check_equal_variables(after, one)
    self.check_different(self.before(2), one)

  def test_slim_model_deploy_needs_regularization_loss(self):
    without = ("graph.loss + graph.regularization_loss", "graph.loss")
    self.check_different(self.after(2, replaced=[without]), self.before(1))

  def test_slim_model_deploy_with_one_batch_for_all(self):
    batch = [("inputs=batches", "inputs=iterator.get_next()"),
             ("12 // len(devices)", "12")]
    self.check_equal(self.after(2, replaced=batch), self.before(1))

  def test_tf_layers(self):
    before = self.before()
    for count in (1, 2, 3):
      after = self.after(count)
      self.check_equal(after, before)
      self.check_equal_variables(after, before)

  def test_tf_layers_of_each_tower_differ(self):
    own = ("build_towers(model_fn, devices,",
           "build_towers(model_fn, devices, sync_batch_norm=False,")
    self.check_different(self.after(2, replaced=[own]), self.before())

  def test_tf_layers_with_the_control_dependencies_kept(self):
    keep = ("train_op = graph", "with tf.control_dependencies("
            "tf.get_collection(tf.GraphKeys.UPDATE_OPS)):\n  train_op = graph")
    kept = self.after(2, replaced=[keep])
    self.check_equal_variables(kept, self.before())

  def test_estimator(self):
    before = self.before()
    self.assertEqual(before["scores"][0], 5)
    for count in (1, 2, 3):
      after = self.after(count)
      self.check_equal(after, before)
      self.check_equal(after, before, "scores")
      self.check_equal_variables(after, before)

  def test_keras_multi_gpu_model(self):
    one = self.before(1)
    for count in (1, 2, 3):
      self.check_equal(self.after(count), one)
    self.check_different(self.before(2), one)

  def test_mirrored_strategy(self):
    one = self.before(1)
    for count in (1, 2, 3):
      self.check_equal(self.after(count), one)
    self.check_different(self.before(2), one)

  def test_mirrored_strategy_with_shared_variables(self):
    shared = (', variables="replicated"', "")
    self.check_equal(self.after(2, replaced=[shared]), self.before(1))

  def test_every_page_has_a_test(self):
    for path in sorted((DOCS / "migrate").glob("*.md")):
      with self.subTest(path.stem):
        self.assertTrue(hasattr(self, f"test_{path.stem}"))


def guide_examples():
  """Returns the code blocks of the guide, with what each is said to print."""
  text = (DOCS / "guide.md").read_text(encoding="utf-8")
  return re.findall(
      r"^```python\n(.*?)^```$(?:\s*^```text\n(.*?)^```$)?", text,
      re.MULTILINE | re.DOTALL)


class GuideTest(absltest.TestCase):

  def test_examples_run_and_print_what_they_say(self):
    examples = guide_examples()
    self.assertGreater(len(examples), 10)
    self.assertGreater(len([text for _, text in examples if text]), 7)
    names = {"__name__": "__main__"}
    # One after the other: later ones use the names of those before.
    for number, (source, expected) in enumerate(examples):
      with self.subTest(number):
        self.assertEqual(execute(source, names)[1], expected)


def without_code(text):
  """Returns a page without fenced blocks and code spans."""
  text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
  return re.sub(r"(`+)(?!`).+?(?<!`)\1(?!`)", "", text, flags=re.DOTALL)


def links(page):
  """Returns where a page leads to, but for other sites."""
  text = without_code(page.read_text(encoding="utf-8"))
  return [target for target in re.findall(r"\]\(([^)\s]+)\)", text)
          if not urllib.parse.urlparse(target).scheme]


def anchors(page):
  """Returns the names that GitHub gives the headings of a page."""
  text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"),
                flags=re.MULTILINE | re.DOTALL)
  return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
          for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE)}


def broken_links(page):
  """Returns the links of a page that lead nowhere."""
  broken = []
  for target in links(page):
    path, _, anchor = target.partition("#")
    other = (page.parent / path).resolve() if path else page
    if not other.exists() or anchor and anchor not in anchors(other):
      broken.append(target)
  return broken


class LinksTest(parameterized.TestCase):

  @parameterized.named_parameters(*[
      (str(path.relative_to(ROOT)), path)
      for path in [ROOT / "README.md", *PAGES]])
  def test_links_lead_somewhere(self, page):
    self.assertEmpty(broken_links(page))

  def test_the_guide_leads_to_every_page(self):
    guide = DOCS / "guide.md"
    found = {(DOCS / target.partition("#")[0]).resolve()
             for target in links(guide)}
    self.assertEmpty(set(PAGES) - found - {guide})

  def test_finds_broken_links(self):
    folder = pathlib.Path(self.create_tempdir().full_path)
    (folder / "other.md").write_text("# A `b` c, d\n", encoding="utf-8")
    page = folder / "page.md"
    page.write_text(
        "# Here\n[a](other.md) [b](other.md#a-b-c-d) [c](#here) "
        "[d](https://example.org/x) `[e](code.md)` ![f](no.png) "
        "[g](other.md#no) [h](#no)\n", encoding="utf-8")
    self.assertEqual(broken_links(page), ["no.png", "other.md#no", "#no"])


class PagesTest(parameterized.TestCase):

  @parameterized.named_parameters(
      *[(str(path.relative_to(DOCS)), path) for path in PAGES])
  def test_names_and_files_exist(self, page):
    text = page.read_text(encoding="utf-8")
    for name in sorted(set(re.findall(r"\btowers((?:\.\w+)+)", text))):
      if name.startswith(".py"):
        continue
      value = towers
      for part in name.split(".")[1:]:
        self.assertTrue(hasattr(value, part), f"towers{name}")
        value = getattr(value, part)
    for name in sorted(set(re.findall(r"\btools/\w+\.py", text))):
      self.assertTrue((ROOT / name).exists(), name)

  @parameterized.named_parameters(
      *[(str(path.relative_to(DOCS)), path) for path in PAGES])
  def test_wrapped_at_100_columns(self, page):
    self.assertEmpty([
        line for line in page.read_text(encoding="utf-8").splitlines()
        if len(line) > 100 and not line.lstrip("- ").startswith(("``", "|"))])

  def test_architecture_names_every_module_in_import_order(self):
    text = (DOCS / "architecture.md").read_text(encoding="utf-8")
    self.assertEqual(tuple(re.findall(r"^- `(\w+)\.py`: ", text, re.MULTILINE)),
                     test_public_api.LAYERS)

  def test_pictures_are_well_formed(self):
    pictures = sorted((DOCS / "images").glob("*.svg"))
    self.assertNotEmpty(pictures)
    for path in pictures:
      ElementTree.parse(path)


def named_in(cell):
  """Returns the pairs of file and test that a cell of the table names."""
  return re.findall(r"`(test_\w+\.py)::(test_\w+)`", cell)


class FaultsFromTheFieldTest(absltest.TestCase):
  """The table of faults that others met, against the tests that there are."""

  def setUp(self):
    super().setUp()
    text = (DOCS / "testing.md").read_text(encoding="utf-8")
    section = re.search(r"^## Faults from the field\n(.*?)(?=^## |\Z)", text,
                        re.MULTILINE | re.DOTALL).group(1)
    self.prose = section.partition("\n| ")[0]
    self.rows = [[cell.strip() for cell in line.strip("|").split("|")]
                 for line in section.splitlines() if line.startswith("| c0")]
    self.sources = {
        path.name: path.read_text(encoding="utf-8")
        for path in sorted((ROOT / "tests").glob("test_*.py"))}

  def test_every_listed_case_has_a_row(self):
    listed = re.findall(r"\bc0\d\d\b", self.prose)
    self.assertEqual([row[0] for row in self.rows], listed)
    self.assertEqual(listed, sorted(set(listed)))
    self.assertIn(f"The {len(listed)} cases", self.prose)

  def test_every_case_that_a_test_names_has_a_row(self):
    named = {case for source in self.sources.values()
             for case in re.findall(r"(?<![^\W_])c0\d\d(?![^\W_])", source)}
    self.assertEqual(sorted(named), [row[0] for row in self.rows])

  def test_tests_exist_and_name_their_case(self):
    for case, fault, tests, neighbours, what in self.rows:
      with self.subTest(case):
        self.assertTrue(fault and what)
        tried, beside = named_in(tests), named_in(neighbours)
        self.assertTrue(tried and beside)
        self.assertLen(tried + beside, (tests + neighbours).count("`") // 2)
        self.assertEmpty(set(tried) & set(beside))
        for file, name in tried + beside:
          self.assertRegex(self.sources[file], rf"\n  def {name}\(", file)
        for file, _ in tried:
          self.assertIn(case, self.sources[file])


if __name__ == "__main__":
  absltest.main()
