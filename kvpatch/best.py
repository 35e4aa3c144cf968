"""The policy "best": a ranking by the heads that copy from the context, found for a model by `kvpatch calibrate`.

Which heads those are belongs to a model, so they are kept in a profile: a TOML file that names the model it is for and
the policy. Profiles are looked for in the user's cache folder and among those that kvpatch ships.
"""

import dataclasses
import hashlib
import tomllib
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

import torch

from kvpatch.cachelayer import heads_of
from kvpatch.compression.rule import Prefill
from kvpatch.demo import cache_folder
from kvpatch.policy import OF_MODEL as NAME
from kvpatch.policy import Policy, resolve
from kvpatch.ranking import Blend

FALLBACK = "inertia"
SUFFIX = ".best.toml"
_ROWS = 64  # of the embedding, in the fingerprint


class ProfileError(ValueError):
    """A profile that can't be read, or is another model's."""


@dataclasses.dataclass(frozen=True)
class Profile:
    """What was found for one model.

    Attributes:
        model: what identifies it, as `identity` gives it.
        policy: the policy.
        measured: what the calibration saw; JSON types.
        path: where it was read, None for one that was just made.
    """

    model: dict
    policy: Policy
    measured: dict
    path: Path | None = None

    def to_dict(self) -> dict:
        """As it stands in the file."""
        fields = _changed(self.policy, Policy(name=NAME))
        blend, prefill = fields.pop("blend", None), fields.pop("prefill", None)
        found = {"model": self.model, "policy": fields}
        if prefill is not None:
            found["prefill"] = _changed(prefill, Prefill())
        if blend is not None:
            found["blend"] = _changed(blend, Blend()) | {"share": blend.share}
        return found | {"measured": self.measured}

    def write(self, path: Path) -> None:
        """Write the file; its folder is made."""
        import tomli_w

        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(tomli_w.dumps(self.to_dict()), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> "Profile":
        """Read a file.

        Raises:
            ProfileError: naming the file and what is wrong with it.
        """
        try:
            given = tomllib.loads(Path(path).read_text(encoding="utf-8"))
            fields = dict(given["policy"])
            if "blend" in given:
                fields["blend"] = Blend(**given["blend"])
            if "prefill" in given:
                fields["prefill"] = Prefill(**given["prefill"])
            return cls(dict(given["model"]), Policy(**{"name": NAME} | fields), given.get("measured", {}), Path(path))
        except OSError as error:
            raise ProfileError(f"profile {path} can't be read: {error.strerror or error}") from error
        except KeyError as error:
            raise ProfileError(
                f"profile {path} has no table [{error.args[0]}]; `kvpatch calibrate` writes one"
            ) from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError, TypeError, ValueError) as error:
            raise ProfileError(f"profile {path} is not one of this version: {error}") from error


def _changed(given, default) -> dict:
    """Fields that differ from the default's."""
    pairs = ((field.name, getattr(given, field.name)) for field in dataclasses.fields(given))
    found = {name: value for name, value in pairs if value != getattr(default, name)}
    return {name: [list(one) if isinstance(one, tuple) else one for one in value] if isinstance(value, tuple) else value
            for name, value in found.items()}  # fmt: skip


def identity(model) -> dict:
    """What identifies a model: its shape, and a fingerprint of its weights.

    The fingerprint is of the first rows of the embedding in bfloat16, so that loading in another dtype, adapters, and
    tokens added at the end leave it as it is.
    """
    config = model.config.get_text_config(decoder=True)
    heads, groups, width = heads_of(config)
    rows = model.get_input_embeddings().weight[:_ROWS].detach().to("cpu", torch.bfloat16).contiguous()
    return {
        "type": config.model_type,
        "layers": config.num_hidden_layers,
        "heads": heads,
        "kv_heads": groups,
        "head_size": width,
        "hidden_size": config.hidden_size,
        "fingerprint": hashlib.sha256(rows.view(torch.int16).numpy().tobytes()).hexdigest()[:16],
    }


def user_folder() -> Path:
    """Where `kvpatch calibrate` keeps profiles."""
    return cache_folder() / "profiles"


def file_name(model) -> str:
    """A profile's file name for this model."""
    found = identity(model)
    return f"{found['type']}-{found['layers']}x{found['hidden_size']}-{found['fingerprint'][:8]}{SUFFIX}"


def _known() -> Iterator[Path]:
    """Profiles of the user, then those that are shipped."""
    folder = user_folder()
    if folder.is_dir():
        yield from sorted(folder.glob(f"*{SUFFIX}"))
    for one in sorted(resources.files("kvpatch.profiles").iterdir(), key=lambda one: one.name):
        if one.name.endswith(SUFFIX):
            with resources.as_file(one) as path:
                yield path


def find(model) -> Profile | None:
    """The profile that was made for this model's weights."""
    wanted = identity(model)
    for path in _known():
        if wanted["fingerprint"] in path.read_text(encoding="utf-8"):
            profile = Profile.read(path)
            if profile.model == wanted:
                return profile
    return None


def policy_for(model, profile: "Profile | Path | str | None" = None) -> tuple[Policy, str]:
    """The policy "best" of this model, and in words where it comes from.

    Args:
        profile: a profile or its file, in place of one that is looked for.

    Returns:
        without a profile, the policy "inertia" under the name "best".

    Raises:
        ProfileError: for a file that can't be read or is for a model of another shape.
    """
    if profile is None:
        found = find(model)
        if found is None:
            why = f"no profile for this model: it runs as {FALLBACK!r}; `kvpatch calibrate` makes one"
            return resolve(FALLBACK, name=NAME), why
        return found.policy, f"profile {found.path.name}"
    found = profile if isinstance(profile, Profile) else Profile.read(Path(profile))
    wanted = identity(model)
    for field, value in wanted.items():
        if field != "fingerprint" and found.model.get(field) != value:
            raise ProfileError(
                f"profile {found.path or 'given'} is for a model with {field}={found.model.get(field)!r}, this one has "
                f"{field}={value!r}"
            )
    known = found.model.get("fingerprint") == wanted["fingerprint"]
    of_others = "" if known else ", which was made for other weights of this shape"
    return found.policy, f"profile {found.path.name if found.path else 'given'}{of_others}"
