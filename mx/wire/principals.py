"""Who calls, and what a policy lets him do: each service asks its `Access`.

The principal of a call is what the client's certificate names (`mx.core.policy`); without TLS the
address that the call comes from. A process reads its policy again when the file changes, and ends
what is no longer allowed.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from mx.core.policy import Policy, Right, Rights, Subject, read_policy, subject_of
from mx.errors import ClosedError, ConfigError, MxError, NotAllowedError
from mx.log import event
from mx.records import record
from mx.runtime import in_thread
from mx.transport import TlsFiles
from mx.wire.address import address_of_peer
from mx.wire.refusals import INTERVAL_S, Refusals

if TYPE_CHECKING:
    from cryptography.x509 import Certificate

log = logging.getLogger(__name__)
#: Who bound, updated and was refused what.
audit = logging.getLogger("mx.audit")

_DOING = {
    Right.SERVE: "serve",
    Right.PULL: "pull",
    Right.TAKE_REQUESTS: "take requests for",
    Right.OBSERVE: "observe",
}
_MOST_BYTES = 1 << 20
_MOST_KNOWN = 4096
#: What names and texts of callers are cut to, for logs and errors.
_MOST_CHARACTERS = 200
#: Any of these lets a principal see a model's sources.
SEES = (Right.OBSERVE, Right.PULL, Right.SERVE)


@record(frozen=True, slots=True)
class Caller:
    """Who calls: whom his certificate names (None: he shows none), and his connection's address,
    without the port."""

    subject: Subject | None
    address: str

    @property
    def name(self) -> str:
        """The principal."""
        return self.subject.name if self.subject is not None else self.address


def caller_of(context: Any) -> Caller:
    """Return who makes a call.

    Args:
        context: The call's servicer context.

    Raises:
        NotAllowedError: The certificate names no process, or several.
    """
    address, shown = _address(context.peer()), context.auth_context()
    if "x509_pem_cert" not in shown:
        return Caller(None, address)
    names = (tuple(shown.get(key, ())) for key in ("peer_uri", "peer_dns", "peer_ip"))
    return Caller(_subject(*names), address)


#: A connection has many calls.
_address = functools.lru_cache(maxsize=4096)(address_of_peer)


@functools.lru_cache(maxsize=4096)
def _subject(
    uris: tuple[bytes, ...], dns: tuple[bytes, ...], addresses: tuple[bytes, ...]
) -> Subject:
    try:
        texts = ([each.decode() for each in names] for names in (uris, dns, addresses))
        return subject_of(*texts)
    except UnicodeDecodeError:
        raise NotAllowedError("your certificate's subjectAltName is not text") from None
    except NotAllowedError as error:
        raise NotAllowedError(f"your certificate {error.message}", hint=error.hint) from None


def payer_of(context: Any) -> str:
    """Return whom a call's quotas are counted for: its principal."""
    return caller_of(context).name


class Access:
    """Decides what the callers of a process may do. On the loop; any number of services share it.

    Attributes:
        version: Changes with the policy, and where an authority is not trusted any more.
    """

    def __init__(
        self,
        path: str = "",
        tls: TlsFiles | None = None,
        *,
        what: str = "process",
        error: type[MxError] = NotAllowedError,
    ) -> None:
        """
        Args:
            path: The policy's file; "" for none: then everything is allowed.
            tls: The files of the process.
            what: What messages call the process.
            error: What a refusal raises.

        Raises:
            ConfigError: The policy can't be read, or there is no TLS.
        """
        self._path, self._what, self._kind = path, what, error
        self._policy: Policy | None = None
        self._data: bytes | None = None
        self._rights: dict[Subject, Rights] = {}
        self.version = 0
        self._listeners: list[Callable[[], None]] = []
        self._standing: set[Callable[[], None]] = set()
        self._refusals = Refusals()
        if path:
            if tls is None:
                raise ConfigError(
                    f"`policy` {path} names certificates, and this {what} asks for none",
                    hint="give `tls_cert`, `tls_key` and `tls_ca`, too",
                )
            self._data = _read(path)
            self._policy = _parsed(self._data, path)
        self._authority = tls.authority if tls is not None else ""
        #: The authorities that are trusted since one of before is not, whose members may have
        #: connections; None: all connections were verified by those that still are.
        self._trusted: frozenset[Certificate] | None = None
        self._signed: dict[bytes, bool] = {}  # by the digest of what was shown

    def say(self) -> None:
        """Log what holds: the policy, or that there is none."""
        if self._policy is not None:
            event(log, "policy.read", policy=self._path, rules=len(self._policy.rules))
        elif self._authority:
            text = f"no `policy`: every certificate of `tls_ca` {self._authority} may do everything"
            event(log, "policy.none", text=f"{text} at this {self._what}")

    def trust(self, before: bytes, now: bytes) -> None:
        """Take up another file of authorities: members of one that is gone from it can make no more
        calls on connections that they have. What runs goes on, so that certificates can be
        replaced under it.

        Args:
            before: The PEM of the authorities that connections were verified by.
            now: The PEM of those of now.
        """
        from mx.wire.authority import certificates_in

        found = certificates_in(now)
        removed = certificates_in(before) - found
        if removed or self._trusted is not None:
            self._trusted = found
            self._signed.clear()
        if removed:
            self._changed()

    def check_connection(self, context: Any) -> None:
        """Raise ClosedError if a call's connection is of an authority that is not trusted any more:
        who has a certificate of another one by now connects again."""
        if not self._is_trusted(context):
            raise ClosedError(
                f"this {self._what} does not trust the authority of this connection any more"
            )

    def _is_trusted(self, context: Any) -> bool:
        if self._trusted is None:
            return True
        from mx.wire.authority import is_signed

        about = context.auth_context()
        shown = (*about.get("x509_pem_cert", ()), *about.get("x509_pem_cert_chain", ()))
        digest = hashlib.sha256(b"".join(shown)).digest()
        known = self._signed.get(digest)
        if known is None:
            if len(self._signed) >= _MOST_KNOWN:
                self._signed.clear()
            known = self._signed[digest] = is_signed(shown, self._trusted)
        return known

    def caller(self, context: Any) -> Caller:
        """Return who makes a call. Raises as `require` if its certificate names no process, or is
        of an authority that is not trusted any more."""
        try:
            if not self._is_trusted(context):
                raise NotAllowedError(
                    f"this {self._what} does not trust the authority of your certificate any more",
                    hint="check `tls_ca` there, and `tls_cert` here",
                )
            return caller_of(context)
        except NotAllowedError as error:
            unknown = Caller(None, address_of_peer(context.peer()))
            self.refused(unknown, error)
            raise self._kind(error.message, hint=error.hint) from None

    def allows(self, caller: Caller, rights: tuple[Right, ...], model: str | None = None) -> bool:
        """Return True if a caller may do one of these things with a model; None: with any."""
        if self._policy is None:
            return True
        subject = caller.subject
        if subject is None:
            return False
        known = self._rights.get(subject)
        if known is None:
            if len(self._rights) >= _MOST_KNOWN:
                self._rights.clear()
            known = self._rights[subject] = self._policy.of(subject)
        return known.allow(rights, model)

    def seeing(self, caller: Caller, rights: tuple[Right, ...]) -> Callable[[str], bool] | None:
        """Return what says with which models a caller may do one of these things; None: with all,
        since there is no policy."""
        if self._policy is None:
            return None
        return lambda model: self.allows(caller, rights, model)

    def require(
        self, context: Any, rights: tuple[Right, ...], model: str | None = None, **about: Any
    ) -> Caller:
        """Return who makes a call, if he may do one of these things.

        Args:
            context: The call's servicer context.
            rights: The rights, of which the first names what is refused.
            model: The model's name; None for any.
            about: What a refusal's audit line says besides.

        Raises:
            NotAllowedError: He may not; or the other error that this was made with.
        """
        caller = self.caller(context)
        if not self.allows(caller, rights, model):
            error = self._error(caller, rights[0], model)
            self.refused(caller, error, right=rights[0].value, model=model or "", **about)
            raise error
        return caller

    def require_some(self, context: Any) -> None:
        """Refuse a caller that may do nothing at all. Raises as `require`."""
        caller = self.caller(context)
        if not self.allows(caller, tuple(Right)):
            error = self._kind(
                f"{caller.name} may do nothing here: the policy of this {self._what} has no rule "
                "for it",
                hint="ask who runs it for a rule in its `policy`",
            )
            self.refused(caller, error)
            raise error

    def _error(self, caller: Caller, right: Right, model: str | None) -> MxError:
        what = "any model" if model is None else f"{model[:_MOST_CHARACTERS]!r}"
        return self._kind(
            f"{caller.name} may not {_DOING[right]} {what}: the policy of this {self._what} has no "
            "rule for it",
            hint=f"ask who runs it for a rule with may = {right.value!r} in its `policy`",
        )

    def refused(self, caller: Caller, error: MxError, **about: Any) -> None:
        """Write the audit line of a refusal, as far as `Refusals` lets it pass."""
        kind = type(error).__name__
        about = {key: str(value)[:_MOST_CHARACTERS] for key, value in about.items()}
        alike = kind, about.get("right", ""), about.get("model", "")
        held_back = self._refusals.passes(caller.name, alike)
        if held_back is not None:
            more = {"held_back": held_back} if held_back else {}
            write("refused", caller, error=kind, text=error.message[:500], **about, **more)

    def _say_left_out(self, now_s: float | None = None) -> None:
        for fields in self._refusals.left_out(now_s):
            event(audit, "audit.refused", **fields)

    @contextmanager
    def standing(
        self, context: Any, rights: tuple[Right, ...], model: str, **about: Any
    ) -> Iterator[Caller]:
        """As `require`, and for as long as the block runs: it is cancelled when a new policy ends
        the right. For coroutines, not for generators.

        Raises:
            NotAllowedError: As `require`, and when the caller may not any more.
        """
        caller = self.require(context, rights, model, **about)
        task, ended = asyncio.current_task(), False
        assert task is not None

        def look() -> None:
            nonlocal ended
            if not ended and not self.allows(caller, rights, model):
                ended = True
                task.cancel()

        self._standing.add(look)
        try:
            yield caller
        except asyncio.CancelledError:
            if not ended or task.uncancel() > 0:
                raise
            error = self._error(caller, rights[0], model)
            self.refused(caller, error, right=rights[0].value, model=model or "", **about)
            raise error from None
        finally:
            self._standing.discard(look)

    def follow(self, listener: Callable[[], None]) -> None:
        """Call `listener` after each change of `version`."""
        self._listeners.append(listener)

    async def watch(self) -> None:
        """Read the policy again whenever its file changes, and write the audit lines of what was
        left out; runs until cancelled. A bad policy is logged, and the one of before holds."""
        from mx.wire.reloading import each_change

        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._count(), name="mx-audit")
                if self._path:
                    following = each_change([self._path], self._reread)
                    tasks.create_task(following, name="mx-policy-file")
        finally:
            self._say_left_out(math.inf)

    async def _count(self) -> None:
        while True:
            await asyncio.sleep(INTERVAL_S / 10)
            self._say_left_out()

    async def _reread(self, found: list[bytes | None]) -> None:
        (data,) = found
        if data == self._data:
            return
        try:
            policy = await in_thread(_parsed, _checked(data, self._path), self._path)
        except ConfigError as error:
            self._data = data
            text = f"the policy of before holds: {error}"
            event(log, "policy.bad", level=logging.WARNING, policy=self._path, text=text)
            return
        self._data, self._policy = data, policy
        self._rights.clear()
        self.say()
        self._changed()

    def _changed(self) -> None:
        self.version += 1
        for call in (*self._standing, *self._listeners):
            try:
                call()
            except Exception:  # one that fails lets no other keep what it may not have
                log.exception("the new policy could not be told to all that runs")


def write(what: str, caller: Caller, **fields: Any) -> None:
    """Write an audit line: what a principal has done."""
    event(audit, f"audit.{what}", principal=caller.name, address=caller.address, **fields)


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"`policy` {path}: {error.strerror}") from None


def _checked(data: bytes | None, path: str) -> bytes:
    return _read(path) if data is None else data


def _parsed(data: bytes, path: str) -> Policy:
    try:
        if len(data) > _MOST_BYTES:
            raise ConfigError(f"it is larger than {_MOST_BYTES >> 20} MiB")
        return read_policy(data.decode())
    except UnicodeDecodeError:
        raise ConfigError(f"`policy` {path}: it is not UTF-8 text") from None
    except ConfigError as error:
        raise ConfigError(
            f"`policy` {path}: {error.message}", hint="docs/policy.md shows how one is written"
        ) from None
