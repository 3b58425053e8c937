"""What makes N towers compute something else than one device, in words."""

from typing import Mapping, NamedTuple


class Rule(NamedTuple):
  """A kind of fault.

  Fields:
    why: What happens, to follow the name of an operation.
    remedy: What to do.
  """
  why: str
  remedy: str


RULES: Mapping[str, Rule] = {
    "batch_norm_of_own_rows": Rule(
        "normalises by the statistics of a tower's own rows, where one device "
        "takes the whole batch.",
        "Leave out `towers.no_sync()` and `sync_batch_norm=False`; for "
        "statistics written by hand, use `towers.moments`."),
    "shuffle_in_tower": Rule(
        "puts the rows of each tower in another order, where one device "
        "shuffles the whole batch.",
        "Shuffle in the input pipeline, before the batch is dealt out, or use "
        "`towers.all_gather` to reach the rows of all towers."),
    "own_random_numbers": Rule(
        "draws other numbers in the towers than on one device.",
        "It is no fault of a model that draws independent numbers for each "
        "row: check it with `hold_random=True`."),
    "same_random_numbers": Rule(
        "draws the same numbers in each tower, for different rows: it has a "
        "seed of its own.",
        "Leave out its `seed` and call `tf.set_random_seed`, or add "
        "`towers.current_tower().index` to the seed."),
    "random_numbers_for_whole_batch": Rule(
        "draws numbers that do not belong to rows: one device draws them once "
        "for the whole batch, and each tower its own.",
        "Draw for each row, in a shape that begins with the batch; or take "
        "one tower's, `towers.merge(lambda values: values[0], x)`."),
    "sum_over_rows": Rule(
        "adds up over the rows of a tower, where a mean is expected: the "
        "towers' values are averaged, so that it counts for one tower only.",
        "Take the mean, with `tf.reduce_mean`, or add the towers' values up "
        "with `towers.all_reduce(x)`."),
    "mean_without_weight": Rule(
        "divides by a sum that differs between towers, such as the number of "
        "valid places, while the towers' values are weighted by rows.",
        "Return `towers.TowerSpec(loss, outputs, weight=...)` with what it "
        "divides by as the weight."),
    "weight_of_another_mean": Rule(
        "is a mean over rows, while the towers' values are averaged by another "
        "weight.",
        "Let the `weight` of `towers.TowerSpec` be what the loss is divided "
        "by, or leave it out for rows."),
    "statistic_of_own_rows": Rule(
        "takes a statistic over the rows of a tower, which then goes into "
        "each of its rows; one device takes it over the whole batch.",
        "Use `towers.moments`, `towers.all_reduce` or `towers.all_gather`."),
    "function_of_batch_statistic": Rule(
        "is no mean over rows: it computes with a statistic of a tower's own "
        "rows, and the mean over the towers is not that of the whole batch.",
        "Put the statistic together first, with `towers.all_reduce(x, "
        "op=\"mean\")` or `towers.moments`."),
    "reduction_over_rows": Rule(
        "reduces the rows of a tower to what cannot be averaged over towers.",
        "Reduce the rows of all towers, `towers.all_gather(x)`, or return "
        "what belongs to rows as an output."),
    "batch_size": Rule(
        "depends on the number of rows, which is less in a tower than on one "
        "device.",
        "Use the number of rows of all towers, `towers.all_reduce(rows)`."),
    "position_in_batch": Rule(
        "takes rows by where they stand in the batch of a tower.",
        "Gather the rows of all towers with `towers.all_gather`, or give "
        "positions as an input."),
    "pairs_of_rows": Rule(
        "brings each row together with the other rows of its tower only; one "
        "device has all rows of the batch.",
        "Use `towers.all_gather(x)` for the rows to compare with."),
    "tower_dependent": Rule(
        "is another value in each tower.",
        "Build the same model in each tower: let nothing hang on "
        "`towers.current_tower().index`, on a counter, or on `random` of "
        "Python or NumPy. Make such values once, outside of the model "
        "function."),
    "update_of_first_tower": Rule(
        "changes a variable by what comes from the rows of tower 0 only.",
        "Put the towers' values together before, with `towers.all_reduce(x, "
        "op=\"mean\")`."),
    "update_in_each_tower": Rule(
        "changes a variable in each tower, so N times in a step.",
        "Put it into `tf.GraphKeys.UPDATE_OPS` and use update_ops=\"first\", "
        "or count outside of the model function."),
    "update_is_another": Rule(
        "changes a variable otherwise than on one device.",
        "Let what is assigned come from all towers, with `towers.all_reduce`."),
    "gradient_function": Rule(
        "has the right value, but a gradient of its own that depends on the "
        "rows of a tower.",
        "Let the gradient function of `tf.custom_gradient` work row by row, "
        "or with `towers.all_reduce`."),
    "gradient_counted_again": Rule(
        "has a gradient that is N times that of one device, or one N-th of "
        "it.",
        "Count what each tower adds once: scale it by the share of the tower, "
        "or add it to the loss outside of the towers."),
    "batch_size_fixed": Rule(
        "works with the number of rows of the whole batch only, and fails in a "
        "tower.",
        "Let the batch be -1 in `tf.reshape`, and take its size from "
        "`tf.shape(x)[0]`."),
    "towers_differ": Rule(
        "cannot be built in towers.",
        "Follow the message; the model must take the same path in each tower."),
    "fails_in_towers": Rule(
        "runs on one device and fails in towers.", "Follow the message."),
    "unknown": Rule(
        "is where towers first differ from one device.",
        "See what it computes, and whether that depends on other rows."),
}
