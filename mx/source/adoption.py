"""How a source takes over the layout and the chunk size in which its weights are listed already.

Sources in one layout and chunk size can trade chunks, so a coordinator asks each that registers to
adopt those of the oldest source of the same weights. The memory stays as it is; rows say where the
bytes of the adopted layout are in it.

The coordinator is not believed. That the layout describes the same weights is proved with this
source's own identity document; if it does not, the source disputes it, and is asked to adopt the
next one or listed with its own.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace

from mx.codec import MAX_DISPUTES
from mx.core import manifest as manifests
from mx.core.digest import SHORTCUT_BYTES
from mx.core.extents import relaid_digests
from mx.core.pages import Pages
from mx.core.types import ManifestRef
from mx.errors import (
    CoordinatorError,
    IntegrityError,
    LocalError,
    ManifestError,
    PeerProtocolError,
    UnknownModelError,
)
from mx.log import event
from mx.runtime import in_thread
from mx.source.model import HeldModel
from mx.wire.client import CoordinatorClient, Registered

log = logging.getLogger(__name__)

#: register(keeps_layout, disputes) registers a source; see `CoordinatorClient.register`.
Register = Callable[[bool, list[bytes]], Awaitable[Registered]]


async def register_adopting(
    register: Register, adopt: Callable[[ManifestRef], Awaitable[None]], *, keeps_layout: bool
) -> Registered:
    """Register a source, in the layout and the chunk size that the coordinator asks for.

    Args:
        register: Registers the source as it is then.
        adopt: Adopts a layout and a chunk size.
        keeps_layout: Ask for none.

    Returns:
        The last answer.

    Raises:
        CoordinatorError: The coordinator asks again and again.
        MxError: As `register`.
    """
    disputes: list[bytes] = []
    for _ in range(2 * MAX_DISPUTES):
        answer = await register(keeps_layout, disputes)
        bound = answer.adopt
        if bound is None:
            return answer
        if keeps_layout:
            break
        try:
            await adopt(bound)
        except (IntegrityError, UnknownModelError, PeerProtocolError) as error:
            event(
                log,
                "source.disputes",
                level=logging.WARNING,
                model=str(answer.model),
                layout=bound.layout.hex()[:16],
                reason=str(error),
            )
            keeps_layout = bound.layout in disputes or len(disputes) == MAX_DISPUTES - 1
            disputes.append(bound.layout)
        except LocalError as error:  # another layout would not help
            log.warning("another source's layout can't be adopted: %s", str(error))
            keeps_layout = True
    raise CoordinatorError("the coordinator asks for one layout after the other")


async def adopted(client: CoordinatorClient, held: HeldModel, bound: ManifestRef) -> HeldModel:
    """Return a model as it is in another layout and chunk size: the same memory, with the same
    files, and a new source id and generation.

    Args:
        client: The coordinator, from which the layout document comes.
        held: The model; its memory is complete.
        bound: The manifest whose layout and chunk size are adopted.

    Raises:
        ManifestError: That layout, or the chunk size, does not fit these weights.
        UnknownModelError, PeerProtocolError, DigestError: The coordinator does not give it.
        CoordinatorError: The coordinator does not answer.
    """
    own = replace(held.laid_out)  # a copy: `held` is to become another
    ref = own.manifest.ref
    if bound.identity != ref.identity:
        raise ManifestError("the coordinator asks to adopt the layout of other weights")
    if bound.layout == ref.layout:
        manifests.check_chunk_nbytes(bound.chunk_nbytes)
        ref = replace(ref, chunk_nbytes=bound.chunk_nbytes)
        found = replace(own, manifest=replace(own.manifest, ref=ref))
    else:
        documents = await client.fetch([(bound.layout, bound.sizes[1])])
        found = await in_thread(_relaid, own, bound, documents)
    found.key, found.own = held.key, own
    found.source_id, found.generation = str(uuid.uuid4()), held.generation + 1
    return found


def _relaid(own: HeldModel, bound: ManifestRef, documents: Mapping[bytes, bytes]) -> HeldModel:
    before = own.manifest
    identity, _, packaging = before.ref.sizes
    ref = replace(
        before.ref,
        layout=bound.layout,
        chunk_nbytes=bound.chunk_nbytes,
        sizes=(identity, bound.sizes[1], packaging),
    )
    manifest = manifests.decode(ref, {**before.documents, **documents})
    side_files = before.documents.keys() - {digest for digest, _ in before.ref.documents}
    manifest.documents.update({digest: before.documents[digest] for digest in side_files})
    layouts = before.layout, manifest.layout
    pages = b"".join(own.pages.get(layer) or b"" for layer in range(len(before.layout.layers)))
    shortcuts = b""
    if own.shortcuts:
        shortcuts = b"".join(relaid_digests(own.shortcuts, *layouts, digest_nbytes=SHORTCUT_BYTES))
    return replace(
        own,
        manifest=manifest,
        pages=Pages.whole(manifest, relaid_digests(pages, *layouts)),
        shortcuts=shortcuts,
        extents=own.places().relaid(*layouts),
        _scattered=None,
    )
