"""Tests that `docs/errors.md` has every message of the library, and no other.

Messages are read from the source: what is raised, what the graph asserts, and
what is warned of. An entry of the page is a message's first words, in double
backticks, up to where it tells of values; a hole of an f-string is written "…".
"""

import ast
import pathlib
import re

from absl.testing import absltest
from absl.testing import parameterized
import towers

PACKAGE = pathlib.Path(towers.__file__).resolve().parent
PAGE = PACKAGE.parent / "docs" / "errors.md"
HOLE = "…"

# What never reaches a user: (file, class).
INTERNAL = {("verification_check.py", "OneDeviceError")}

ERROR = re.compile(r"(^|\.)[A-Z]\w*Error$")
ASSERTS = re.compile(r"^tf\.(debugging\.)?(Assert|assert_\w+)$")


class Messages:
  """The messages in a module."""

  def __init__(self, source, file="module.py"):
    self._tree = ast.parse(source)
    self._file = file
    self._parents = {child: node for node in ast.walk(self._tree)
                     for child in ast.iter_child_nodes(node)}

  def all(self):
    """Returns the messages in the module, with its holes as `HOLE`."""
    found = []
    for node in ast.walk(self._tree):
      if isinstance(node, ast.Call):
        found += self._of_call(node)
    return found

  def _of_call(self, call):
    name = ast.unparse(call.func)
    if ASSERTS.match(name):
      return [text for keyword in call.keywords if keyword.arg == "message"
              for text in self._texts(keyword.value)] + [
                  text for argument in call.args
                  if isinstance(argument, ast.List)
                  for text in self._texts(ast.JoinedStr(argument.elts))]
    if name == "warnings.warn":
      return self._texts(call.args[0])
    if not ERROR.search(name) or (self._file, name) in INTERNAL or (
        name.startswith(("tf.errors.", "_"))):
      return []
    texts = list(self._texts(call.args[0])) if call.args else []
    if not any(text.strip(HOLE) for text in texts):
      raise ValueError(f"The message of {self._file}:{call.lineno} must have "
                       f"literal parts: {ast.unparse(call)}")
    return texts

  def _texts(self, node):
    """Returns what the expression may be, with holes for what is not known."""
    if isinstance(node, ast.Constant):
      return [str(node.value)]
    if isinstance(node, ast.JoinedStr):
      texts = [""]
      for part in node.values:
        # A value that is chosen among words is a hole as well.
        parts = [HOLE] if isinstance(part, ast.FormattedValue) else (
            self._texts(part))
        texts = [one + other for one in texts for other in parts]
      return texts
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
      return [one + other for one in self._texts(node.left)
              for other in self._texts(node.right)]
    if isinstance(node, ast.IfExp):
      return self._texts(node.body) + self._texts(node.orelse)
    if isinstance(node, ast.Call) and ast.unparse(
        node.func) == "tf.strings.join":
      return self._texts(ast.JoinedStr(node.args[0].elts))
    if isinstance(node, ast.Call):
      return self._returned(ast.unparse(node.func).split(".")[-1]) or [HOLE]
    if isinstance(node, ast.Name):
      return self._assigned(node) or [HOLE]
    return [HOLE]

  def _returned(self, function):
    """Returns the texts that a function of the module returns."""
    return [text for node in ast.walk(self._tree)
            if isinstance(node, ast.FunctionDef) and node.name == function
            for inner in ast.walk(node) if isinstance(inner, ast.Return)
            for text in self._texts(inner.value)]

  def _assigned(self, name):
    """Returns the texts that a local variable is set to in its function."""
    scope = name
    while not isinstance(scope, (ast.FunctionDef, ast.Module)):
      scope = self._parents.get(scope) or self._tree
    return [text for node in ast.walk(scope) if isinstance(node, ast.Assign)
            and [ast.unparse(target) for target in node.targets] == [name.id]
            for text in self._texts(node.value)]


def entry(message):
  """Returns the words by which the page lists a message."""
  message = re.sub(rf"{HOLE}(\s*{HOLE})+", HOLE, " ".join(message.split()))
  return re.match(r"(.*?)(: |, got |\. |\.?$)", message).group(1)


def entries_of_source():
  """Returns the files that have each entry."""
  found = {}
  for path in sorted(PACKAGE.glob("*.py")):
    for text in Messages(path.read_text(encoding="utf-8"), path.name).all():
      if text.strip(HOLE + " ."):
        found.setdefault(entry(text), path.name)
  return found


def entries_of(page):
  """Returns what stands in double backticks on a page."""
  page = re.sub(r"^```.*?^```$", "", page, flags=re.MULTILINE | re.DOTALL)
  return [" ".join(text.split())
          for text in re.findall(r"(?<!`)``(?!`)(.+?)(?<!`)``(?!`)", page,
                                 re.DOTALL)]


class PageTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.page = PAGE.read_text(encoding="utf-8")

  def test_every_message_of_the_source_is_on_the_page(self):
    known = set(entries_of(self.page))
    missing = [f"{file}: `` {text} ``" for text, file in
               entries_of_source().items() if text not in known]
    self.assertEmpty(missing, "\n".join(
        ["docs/errors.md must have an entry for each message, it lacks:",
         *missing]))

  def test_the_page_has_no_message_that_the_source_has_not(self):
    known = entries_of_source()
    self.assertEmpty([text for text in entries_of(self.page)
                      if text not in known])

  def test_no_message_stands_twice(self):
    texts = entries_of(self.page)
    self.assertEmpty([text for text in set(texts) if texts.count(text) > 1])

  def test_every_entry_says_what_to_do(self):
    for item in re.findall(r"^- ``.*?(?=\n- |\n\n|\Z)", self.page,
                           re.MULTILINE | re.DOTALL):
      with self.subTest(item.splitlines()[0]):
        told = re.sub(r"``.+?``", "", item, flags=re.DOTALL)
        self.assertGreaterEqual(len(told.split()), 4)

  def test_there_are_many(self):
    self.assertGreater(len(entries_of_source()), 150)


class MessagesTest(parameterized.TestCase):
  """Tries the reader of messages on sources of its own."""

  @parameterized.named_parameters(
      ("literal", 'raise ValueError("`x` must be 1.")', ["`x` must be 1."]),
      ("holes", 'raise TypeError(f"`{x}` must be {y!r}: got "\n f"{z}.")',
       ["`…` must be …: got …."]),
      ("sum", 'raise ValueError("`x` " + ("a" if y else "b"))',
       ["`x` a", "`x` b"]),
      ("by_function",
       'def f(x):\n  return f"`{x}` bad"\ndef g():\n  raise ValueError(f(1))',
       ["`…` bad"]),
      ("by_name", 'def f():\n  text = "`x` bad"\n  raise ValueError(text)',
       ["`x` bad"]),
      ("assert_positive", 'tf.debugging.assert_positive(x, message="`x` bad")',
       ["`x` bad"]),
      ("assert", 'tf.Assert(x, [f"`{y}` bad", z])', ["`…` bad…"]),
      ("joined", 'def f():\n  text = tf.strings.join(["`x` ", y, " bad"])\n'
       "  tf.debugging.Assert(x, [text])", ["`x` … bad"]),
      ("warned", 'warnings.warn("`x` odd", stacklevel=2)', ["`x` odd"]),
      ("not_raised_at_once", 'stop(ValueError("`x` bad"))', ["`x` bad"]),
      ("private", "raise _Error()", []),
      ("again", "raise error", []),
  )
  def test_finds_messages(self, source, expected):
    self.assertEqual(Messages(source).all(), expected)

  def test_refuses_a_message_that_cannot_be_read(self):
    with self.assertRaisesRegex(ValueError, "must have literal parts"):
      Messages("raise ValueError(g(x))").all()

  @parameterized.named_parameters(
      ("colon", "`x` must be 1: got 2. Do it.", "`x` must be 1"),
      ("comma", "`x` must not, got 2. Do it.", "`x` must not"),
      ("sentence", "`x` is bad. Do it.", "`x` is bad"),
      ("end", "`x` is bad.", "`x` is bad"),
      ("lines", "`x`\n  is bad", "`x` is bad"),
  )
  def test_entry_is_the_first_words(self, message, expected):
    self.assertEqual(entry(message), expected)

  def test_reads_entries_of_a_page(self):
    page = ("- `` `x` must\n  be ``, `` y… ``\n  Text `code`.\n"
            "```\n`` z ``\n```\n")
    self.assertEqual(entries_of(page), ["`x` must be", "y…"])


if __name__ == "__main__":
  absltest.main()
