"""`pull`: checks what it is asked for, and starts a `Pull`; `load` waits for its tensors."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Unpack

from mx import config, runtime
from mx.api.arguments import PullArguments, takes
from mx.api.common import check_type
from mx.api.options import asked_companion, pull_options, settings_of
from mx.api.target import Pull
from mx.core.variant import COMPANION
from mx.errors import ConfigError
from mx.wire.address import tls_of

if TYPE_CHECKING:
    import torch

    from mx.fetching.options import PullOptions


@takes(PullArguments)
def pull(model: str, **arguments: Unpack[PullArguments]) -> Pull:
    """Start to pull `model`, and return at once.

    The weights come from the sources that the coordinator lists, unless `peer`, `path` or
    `fallback` (at most one of them) says otherwise.

    Args:
        model: NAME, NAME:REVISION, or NAME@PIN to pin the weights. NAME alone is the newest
            revision that its owner has published, which is waited for (`wait_s`) while it is being
            changed or its sources are away; a pin accepts its weights in any revision.
        source: "peers" (the default), or "auto" to go on with the settings' stores where sources do
            not serve everything: a disk (`checkpoint_root`, or `fallback`), the Hugging Face hub
            (`hub_id`), an object store (`object_url`). What a source, the coordinator or a pin says
            of the weights holds for them. The report has `steps`.
        peer: HOST:PORT of the one source to read from, without a coordinator.
        path: A checkpoint on disk to read, instead of sources.
        fallback: A checkpoint on disk to read what sources do not serve. Without `source="auto"` it
            is taken as it is, whatever the name means elsewhere, if no layer has been delivered.
        revision: The revision, where `model` names none.
        variant: The variant: a word, or a `ProcessingKey` or its text. If empty, "checkpoint", or
            the only one that is listed.
        coordinator: HOST:PORT; None takes the address in the settings.
        device: "cpu" (the default), or "cuda:N" for that GPU's memory, which `out` and
            `verify="strong"` copy back to the host. With `into` it is where that is.
        out: A folder to write a checkpoint to.
        hold: Keep the memory in a form that others can read, and allow `Pull.hold`.
        transport: The name of the only transport to use.
        verify: "chunks" (the default), or "strong" to compare every tensor with the model's
            identity as well.
        attach: False copies even where memory could be shared.
        into: What to fill instead of new memory: a `torch.nn.Module` or a state dict, whose own
            tensors are filled where they are; or a writable, contiguous buffer of at least
            `manifest.layout.arena_nbytes` bytes. The caller owns it. Nothing is written to tensors
            unless all names, shapes, dtypes and ties agree. They must not be used before the pull
            has ended; after a failure they hold a part of the new weights. While the pull serves
            them to others they must not be written to, which ends with `release` or `close`.
        reuse: Pulls and sources of this process, for example of the previous revision or of the
            model that this one was made from. Bytes that they hold are copied locally instead of
            transferred.
        follow: Where the weights change while they are pulled, go over to the new revision instead
            of failing, and keep what is equal: layers that were ready are not any more, and are
            reported again with their `revision`. Wait for the end, or use `on_layer`: `layers()`
            raises RevisionChangedError, as does `tensors()` of an event from before. Nothing that
            the pull returns from then on is of the old revision; tensors that the caller has keep
            its bytes. A pull that is complete follows no further.
        allow_older: Take the newest revision that can be obtained whole, if what the name means
            cannot; the report then says what that is (`newest`).
        only: Names or shell-style patterns of the tensors to pull; None: all. Layers without any
            of them are ready at once, and empty. With `only` or `slices` the pull serves nothing to
            others and attaches to nothing, and can't have `out`, `hold`, `reuse`, `follow` or a
            `device`; `into`, which may be on a GPU, has just these tensors, with their sliced
            shapes.
        slices: By names or patterns of tensors the part that is wanted of them: (dim, begin, end),
            or `mx.Shard(dim, rank, size)` for one rank's even share. Along the first dimension
            little more than the slice is moved; along others every block that holds some of it, up
            to the whole tensor: `plan` says how much. No byte is put in its place before its block
            is verified. From disk the checkpoint is read and hashed whole.
        local_ranks: Which of several pulls on this host, with `only` or `slices`, this one is, as
            `mx.LocalRanks(rank, size)`. They wait for each other, divide what they want among
            them, and hand each other what they have verified: each block is moved to the host
            once. The share of one that ends, or does not answer for `stall_timeout_s`, is read by
            the others. They are processes of one user, and trust each other: not with
            `verify="strong"`. With a `device` instead, or `into` in a GPU's memory, they share
            what they read of a whole model from a store: with digests beside its weights each
            reads a share to its GPU, verifies what it takes from the others' GPUs, and gives its
            own until they have it: what is changed before `wait` returns they read themselves.
        wait_s: Seconds to wait for a source when there is none, at the start or later, keeping
            what has arrived; None takes the time in the settings.
        streams: How many connections to open to each source, or "auto": as many as make the pull
            faster; None takes the number in the settings.
        resume: False neither resumes from what a failed pull left beside `out` nor leaves
            anything there. Otherwise a pull that fails keeps the layers that it has written, and
            its error says so.
        files_only: Pull only the model's side files (configuration, tokenizer), to `out`, or into
            memory, where `Pull.files` has them: all (True), or those of some names or shell-style
            patterns, as far as the model has them. No weights are read, and nothing is said of
            them: the report has `files`, and 0 bytes. Not together with `hold`, `into`, `reuse` or
            a `device`, nor, from `path`, with a pin, which only the weights prove; other options of
            the weights have no effect.
        companion: The path of a further tensor file of the model's folder, such as
            "2_Dense/model.safetensors", to pull in place of the main weights. The model is looked
            up before this returns, and says by which pin.
        companions: With `out`, whether the model's companions are written there, too.
        owner: Take the name only from this owner, whatever the coordinator says: his key, as
            `mx keygen` prints it, or the name's commitment. None takes the settings' `owner`, or
            what the trust file has for the name. Of a name without a revision nothing older is
            taken than what this user has seen of it.
        settings: Settings to use; None loads them from the environment and the files.

    Returns:
        The running pull.

    Raises:
        ConfigError: An argument is wrong. Every other error comes from the methods that wait, and
            with `companion` from this one, too:
            CoordinatorError, UnknownModelError, NoSourceError, IncompleteError, IntegrityError,
            CapacityError, OutputError.
    """
    started_s = time.monotonic()
    settings = settings_of(arguments)
    if settings.policy:  # what lets others read here reads it later, and can't end the pull by then
        from mx.wire.principals import Access

        Access(settings.policy, tls_of(settings), what="source")
    options = pull_options(model, settings, arguments)
    asked = arguments.get("companion", "")
    if asked or COMPANION in options.variant:
        main, path = asked_companion(options, asked)
        if path:
            from mx.fetching.companions import companion_options

            options = runtime.run(lambda: companion_options(main, path))
    return begin(options, settings, started_s)


def begin(options: PullOptions, settings: config.Settings, started_s: float) -> Pull:
    """Begin to pull, and return the running pull.

    Args:
        options: What is pulled.
        settings: The settings of the process.
        started_s: When the caller asked for it.
    """

    async def make(loop: runtime.LoopThread) -> Pull:
        return Pull(loop, options, settings, started_s)

    return runtime.made(make)


@takes(PullArguments)
def load(model: str, **arguments: Unpack[PullArguments]) -> dict[str, torch.Tensor]:
    """Pull a model and return its tensors by name, in execution order.

    One line in place of `safetensors.torch.load_file`. Blocks until every layer is verified; a
    notebook shows a bar.

    Args:
        model: NAME, NAME:REVISION or NAME@PIN.
        arguments: Those of `pull`, except `hold`, which needs the `Pull` itself, and
            `files_only`.

    Returns:
        Views that keep their memory alive: the source's memory, mapped privately, where it could
        be attached, else this process's own. Writing to them changes no other process's bytes.

    Raises:
        ConfigError: An argument is wrong, or torch is not installed.
        MxError: The error that ended the pull, see `pull`.
    """
    check_type("model", model, str, "it is NAME, NAME:REVISION or NAME@PIN")
    if arguments.get("hold"):
        raise ConfigError("`load` can't serve the model", hint="call mx.pull with `hold=True`")
    if arguments.get("files_only"):
        raise ConfigError(
            "`files_only` pulls no tensors", hint="mx.pull(...).files() has the files"
        )
    import mx.memory.tensors  # noqa: F401  # fails before the pull if torch is missing

    with pull(model, **arguments) as running:
        running.wait()
        return running.state_dict()
