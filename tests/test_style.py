"""Checks on the source text that reviewers would otherwise repeat by hand."""

import ast
import io
import pathlib
import re
import tokenize

from absl.testing import absltest
from absl.testing import parameterized
import towers

ROOT = pathlib.Path(__file__).resolve().parent.parent
PACKAGE = pathlib.Path(towers.__file__).resolve().parent
FOLDERS = {
    "towers": PACKAGE,
    "models": ROOT / "models",
    "tools": ROOT / "tools",
    "tests": ROOT / "tests",
}

MAX_COLUMNS = 80
MAX_LINES = 400
# All of TensorFlow's internals stand in one file, so that one look shows them.
MAX_LINES_OF_INTERNALS = 720

# The only file that may use TensorFlow's internals.
INTERNALS = PACKAGE / "_tensorflow.py"

# Python 3.12 and later take f-strings apart into several tokens.
STRING_STARTS = (tokenize.STRING,
                 getattr(tokenize, "FSTRING_START", tokenize.STRING))
STRING_ENDS = (tokenize.STRING,
               getattr(tokenize, "FSTRING_END", tokenize.STRING))
LAYOUT = (tokenize.NL, tokenize.COMMENT, tokenize.INDENT, tokenize.DEDENT)


def sources(*folders):
  """Returns named parameters, one for each Python file in `folders`."""
  return [("_".join([folder, *path.relative_to(FOLDERS[folder]).parent.parts,
                     path.stem.strip("_")]), path)
          for folder in folders
          for path in sorted(FOLDERS[folder].rglob("*.py"))]


def tokens_of(source):
  return list(tokenize.generate_tokens(io.StringIO(source).readline))


def raises(tree):
  """Yields every `SomeError(...)` call node that `tree` raises.

  Leaves out classes with a leading underscore: no user sees these.
  """
  for node in ast.walk(tree):
    if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
      if not ast.unparse(node.exc.func).split(".")[-1].startswith("_"):
        yield node.exc


def literal_text(node):
  """Returns the text of a string literal, or None for another expression."""
  if isinstance(node, ast.Constant) and isinstance(node.value, str):
    return node.value
  if isinstance(node, ast.JoinedStr):
    return "".join(literal_text(value) or "{}" for value in node.values)
  if isinstance(node, ast.BinOp):
    sides = [literal_text(node.left), literal_text(node.right)]
    if any(sides):
      return "{}".join(side or "" for side in sides)
  return None


def unformatted_errors(tree):
  """Yields lines that raise with no message, or one in several arguments."""
  for call in raises(tree):
    if len(call.args) != 1:
      yield call.lineno


def errors_without_backtick(tree):
  """Yields lines that raise with a literal message that names nothing.

  A message that starts with a value names that.
  """
  for call in raises(tree):
    text = literal_text(call.args[0]) if call.args else None
    if text is not None and "`" not in text and not text.startswith("{}"):
      yield call.lineno


def glued_literals(source):
  """Yields lines where two adjacent string literals meet without a space."""
  tokens = [token for token in tokens_of(source) if token.type not in LAYOUT]
  for left, right in zip(tokens, tokens[1:]):
    if left.type in STRING_ENDS and right.type in STRING_STARTS:
      before = left.line[:left.end[1] - 1]  # Up to the closing quote.
      after = right.line[right.start[1]:].lstrip("bfruBFRU")[1:]
      # What ends in `.*` is a regular expression; a value may stand in
      # backticks of which the first ends a literal.
      if not (before.endswith((" ", "\\n", "/", "(", '"', ".*")) or
              after.startswith((" ", "\\n", ",", ".", ":", ";", ")")) or
              before[-1:] + after[:1] == "`{"):
        yield left.start[0]


def single_quotes(source):
  """Yields lines with a single-quoted string that needs no single quotes."""
  for token in tokens_of(source):
    if token.type in STRING_STARTS:
      quoted = token.string.lstrip("bfruBFRU")
      # An f-string's start does not show its text; its line does.
      if quoted.startswith("'") and '"' not in token.line:
        yield token.start[0]


def odd_indents(source):
  """Yields lines that indent a block by other than two spaces."""
  widths = [0]
  for token in tokens_of(source):
    if token.type == tokenize.INDENT:
      if token.string != " " * (widths[-1] + 2):
        yield token.start[0]
      widths.append(len(token.string))
    elif token.type == tokenize.DEDENT:
      widths.pop()


def long_lines(source):
  """Yields lines of more than 80 columns; a line may end in a long URL."""
  for number, line in enumerate(source.splitlines(), 1):
    if len(line) > MAX_COLUMNS and not re.search(r"https?://\S+$", line):
      yield number


def ownerless_todos(source):
  """Yields lines of comments with a TODO that names nobody."""
  for token in tokens_of(source):
    if token.type == tokenize.COMMENT and re.search(r"TODO(?!\(\w)",
                                                    token.string):
      yield token.start[0]


def star_imports(tree):
  for node in ast.walk(tree):
    if isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
      yield node.lineno


def internal_imports(tree):
  """Yields lines that reach for `tensorflow.python`, by name or by string."""
  internals = re.compile(r"tensorflow\.python(\.[\w.]+)?")
  for node in ast.walk(tree):
    names = []
    if isinstance(node, ast.Import):
      names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom) and node.module:
      names = [f"{node.module}.{alias.name}" for alias in node.names]
    elif isinstance(node, ast.Call):  # As in `importlib.import_module`.
      names = [literal_text(argument) or "" for argument in node.args]
    elif isinstance(node, ast.Attribute):
      names = [ast.unparse(node)]
    if any(internals.fullmatch(name) for name in names):
      yield node.lineno


def unmatched_raises(tree):
  """Yields lines of tests that check an error's type but not its text."""
  for node in ast.walk(tree):
    if isinstance(node, ast.Attribute) and node.attr == "assertRaises":
      yield node.lineno


class SourceStyleTest(parameterized.TestCase):

  def check(self, path, rule, lines):
    """Fails the sub-test `rule` if there are `lines` that break it."""
    with self.subTest(rule):
      self.assertEmpty([f"{path.name}:{line}" for line in lines])

  @parameterized.named_parameters(
      ("setup", ROOT / "setup.py"),
      *sources("towers", "models", "tools", "tests"))
  def test_all_code(self, path):
    source = path.read_text(encoding="utf-8")
    tree = ast.parse(source)
    with self.subTest("module_docstring"):
      self.assertTrue(ast.get_docstring(tree))
    self.check(path, "no_glued_words", glued_literals(source))
    self.check(path, "double_quotes", single_quotes(source))
    self.check(path, "two_spaces", odd_indents(source))
    self.check(path, "80_columns", long_lines(source))
    self.check(path, "todos_have_an_owner", ownerless_todos(source))
    self.check(path, "no_star_imports", star_imports(tree))
    if path != INTERNALS:
      self.check(path, "no_tensorflow_internals", internal_imports(tree))

  @parameterized.named_parameters(
      ("setup", ROOT / "setup.py"),
      *sources("towers", "models", "tools"))
  def test_code_that_users_run(self, path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    self.check(path, "one_formatted_message_per_error",
               unformatted_errors(tree))
    self.check(path, "no_asserts_for_user_errors",
               [node.lineno for node in ast.walk(tree)
                if isinstance(node, ast.Assert)])

  @parameterized.named_parameters(*sources("towers"))
  def test_library_code(self, path):
    source = path.read_text(encoding="utf-8")
    self.check(path, "errors_name_what_they_are_about",
               errors_without_backtick(ast.parse(source)))
    with self.subTest("one_screenful_of_ideas"):
      limit = MAX_LINES_OF_INTERNALS if path == INTERNALS else MAX_LINES
      self.assertLessEqual(len(source.splitlines()), limit)
    with self.subTest("has_a_test_of_its_name"):
      if path.name != "__init__.py":
        test = ROOT / "tests" / f"test_{path.stem.lstrip('_')}.py"
        self.assertTrue(test.exists(), f"`{test.name}` is missing.")

  @parameterized.named_parameters(*sources("tests"))
  def test_tests(self, path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    self.check(path, "error_tests_match_the_text", unmatched_raises(tree))


class ChecksTest(parameterized.TestCase):
  """Tries the checks on seeded faults: one that finds nothing is no check."""

  @parameterized.named_parameters(
      ("two_arguments", unformatted_errors, 'raise ValueError("`%s`", x)'),
      ("no_message", unformatted_errors, "raise ValueError()"),
      ("no_backtick", errors_without_backtick, 'raise ValueError(f"bad {x}")'),
      ("no_backtick_in_sum", errors_without_backtick,
       'raise ValueError("bad " + x)'),
      ("star", star_imports, "from os.path import *"),
      ("internal_import", internal_imports,
       "from tensorflow.python.framework import ops"),
      ("internal_from", internal_imports, "from tensorflow import python"),
      ("internal_string", internal_imports,
       'importlib.import_module("tensorflow.python.framework.ops")'),
      ("internal_attribute", internal_imports,
       "import tensorflow\ntensorflow.python.framework"),
      ("type_only", unmatched_raises, "self.assertRaises(ValueError)"),
  )
  def test_finds_fault_in_tree(self, check, source):
    self.assertNotEmpty(list(check(ast.parse(source))))

  @parameterized.named_parameters(
      ("glued", glued_literals, 'x = ("a word"\n     "and another")\n'),
      ("glued_f", glued_literals, 'x = (f"a {y}"\n     f"{z} b")\n'),
      ("single", single_quotes, "x = 'text'\n"),
      ("single_f", single_quotes, "x = f'text {y}'\n"),
      ("four_spaces", odd_indents, "if x:\n    y = 1\n"),
      ("tab", odd_indents, "if x:\n\ty = 1\n"),
      ("long", long_lines, "#" * 81 + "\n"),
      ("ownerless", ownerless_todos, "x = 1  # TODO: see to it\n"),
  )
  def test_finds_fault_in_text(self, check, source):
    self.assertNotEmpty(list(check(source)))

  @parameterized.named_parameters(
      ("spaced", glued_literals, 'x = ("a word "\n     f"and {y} " " more")\n'),
      ("in_backticks", glued_literals, 'x = (f"got `"\n     f"{y.name}`.")\n'),
      ("separate", glued_literals, 'x = ["a", "b"]\n'),
      ("double", single_quotes, "x = \"text\"\ny = 'a \"b\"'\n"),
      ("indented", odd_indents,
       "if x:\n  if y:\n    z = f(\n        1)\nw = 2\n"),
      ("url", long_lines, "#   https://example.org/" + "a" * 80 + "\n"),
      ("owned", ownerless_todos, "x = 1  # TODO(ann): see to it\n"),
  )
  def test_lets_good_text_pass(self, check, source):
    self.assertEmpty(list(check(source)))

  @parameterized.named_parameters(
      ("named", 'raise ValueError(f"`x` must be 1, got {x}.") from error'),
      ("by_value", 'raise ValueError(f"{layer} must be one.")'),
      ("private", "raise _Abandoned()"),
      ("again", "raise error"),
  )
  def test_lets_good_error_pass(self, source):
    tree = ast.parse(source)
    self.assertEmpty(list(unformatted_errors(tree)))
    self.assertEmpty(list(errors_without_backtick(tree)))


if __name__ == "__main__":
  absltest.main()
