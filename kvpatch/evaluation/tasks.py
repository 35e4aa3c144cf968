"""All tasks under their names and families."""

from functools import cache

from kvpatch.evaluation.samples import Task

MEASURED = ("fidelity", "stability")  # families without answers: policies are held against the full cache


@cache
def tasks() -> dict[str, Task]:
    """Name to task, of every task that has answers."""
    from kvpatch.evaluation import grid, later, longbench, longbench2, ruler, wordings

    found = (*ruler.TASKS, *grid.TASKS, *wordings.WORDINGS, *later.TASKS, *longbench.TASKS, *longbench2.TASKS)
    return {task.name: task for task in found}


def families() -> dict[str, tuple[str, ...]]:
    """Family to the names of its tasks."""
    found: dict[str, list[str]] = {}
    for task in tasks().values():
        found.setdefault(task.family, []).append(task.name)
    return {family: tuple(names) for family, names in found.items()} | {name: (name,) for name in MEASURED}


def chosen(names: tuple[str, ...]) -> tuple[str, ...]:
    """Names of single tasks, from families and names.

    Raises:
        ValueError: for an unknown one, with all that there are.
    """
    known, groups = tasks(), families()
    found: list[str] = []
    for name in names:
        if name not in known and name not in groups:
            raise ValueError(
                f"tasks has an unknown name {name!r}; families: {', '.join(groups)}; tasks: {', '.join(known)}"
            )
        found += groups.get(name, (name,))
    return tuple(dict.fromkeys(found))
