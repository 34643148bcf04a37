"""Who calls, and what a policy lets him do: each service asks its `Access`.

The principal of a call is what the client's certificate names (`mx.core.policy`); without TLS the
address that the call comes from. A process reads its policy again when the file changes, and ends
what is no longer allowed, and connections whose certificate has expired, was revoked, or is of an
authority that is not trusted any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mx.core.policy import Policy, Right, Rights, Subject, read_policy, subject_of
from mx.errors import CapacityError, ClosedError, ConfigError, MxError, NotAllowedError
from mx.log import event
from mx.runtime import in_thread
from mx.transport import TlsFiles
from mx.wire.address import address_of_peer
from mx.wire.audit import AuditLog

if TYPE_CHECKING:
    from cryptography.x509 import Certificate

    from mx.core.certificates import Revocations, Validity

log = logging.getLogger(__name__)

_DOING = {
    Right.SERVE: "serve",
    Right.PULL: "pull",
    Right.TAKE_REQUESTS: "take requests for",
    Right.OBSERVE: "observe",
}
_MOST_BYTES = 1 << 20
_MOST_KNOWN = 4096
#: How often what time changes is looked at; and how long before its end a stream is told.
_LOOK_S, _SOON_S = 1.0, 30.0
_CHECK = "check `tls_cert` here, and `tls_ca` there"
#: What names and texts of callers are cut to, for logs and errors.
_MOST_CHARACTERS = 200
#: Any of these lets a principal see a model's sources.
SEES = (Right.OBSERVE, Right.PULL, Right.SERVE)


@dataclass(frozen=True, slots=True)
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
        version: Changes with the policy, and where certificates that were shown are not valid any
            more.
        audit: The audit log.
    """

    def __init__(
        self,
        path: str = "",
        tls: TlsFiles | None = None,
        *,
        what: str = "process",
        error: type[MxError] = NotAllowedError,
        by_name: bool = True,
    ) -> None:
        """
        Args:
            path: The policy's file; "" for none: then everything is allowed.
            tls: The files of the process.
            what: What messages call the process.
            error: What a refusal raises.
            by_name: Callers name the models that they ask for; else a refusal names no model that
                its caller does not see.

        Raises:
            ConfigError: The policy can't be read, or there is no TLS.
        """
        self._path, self._what, self._kind = path, what, error
        self._by_name = by_name
        self._policy: Policy | None = None
        self._data: bytes | None = None
        self._rights: dict[Subject, Rights] = {}
        self.version = 0
        self._listeners: list[Callable[[], None]] = []
        self._standing: set[Callable[[], None]] = set()
        self.audit = AuditLog()
        if path:
            if tls is None:
                raise ConfigError(
                    f"`policy` {path} names certificates, and this {what} asks for none",
                    hint="give `tls_cert`, `tls_key` and `tls_ca`, too",
                )
            self._data = _read(path)
            self._policy = _parsed(self._data, path)
        self._tls = tls
        self._authorities: frozenset[Certificate] | None = None  # None before `trust`
        self._revoked: Revocations | None = None
        self._validities: dict[bytes, Validity] = {}  # by the digest of what was shown
        self._ends_s: set[int] = set()  # when certificates end that were shown, also forgotten ones
        if tls is not None and tls.revocations:
            from mx import revocations

            self._revoked = revocations.current(tls)

    def say(self) -> None:
        """Log what holds: the policy, or that there is none."""
        if self._policy is not None:
            event(log, "policy.read", policy=self._path, rules=len(self._policy.rules))
            digest = hashlib.sha256(self._data or b"").hexdigest()
            self.changed("policy", "read", policy=self._path, sha256=digest)
        elif self._tls is not None:
            ours = self._tls.authority
            text = f"no `policy`: every certificate of `tls_ca` {ours} may do everything"
            event(log, "policy.none", text=f"{text} at this {self._what}")

    def trust(self, before: bytes, now: bytes) -> None:
        """Take up other files: members of an authority that is gone make no more calls on
        connections that they have, and their streams end.

        Args:
            before: The PEM of the authorities that connections were verified by.
            now: The PEM of those of now.
        """
        from mx.core.certificates import certificates_in

        is_first, self._authorities = self._authorities is None, certificates_in(now)
        self._validities.clear()
        removed = certificates_in(before) - self._authorities
        if not is_first:
            self.changed("certificates", "replaced", authorities_removed=len(removed))
        if removed:
            self._changed()

    def check_connection(self, context: Any) -> None:
        """Raise ClosedError if a call's connection is not trusted any more: who has another
        certificate by now connects again."""
        if why := self._why_not(context):
            raise ClosedError(why)

    def ends_soon(self, context: Any, began_s: float) -> bool:
        """Return True if a stream is about to end, since its connection does.

        Args:
            context: The call's servicer context.
            began_s: When it began, by the monotonic clock.
        """
        if self._tls is None:
            return False
        age_s = self._tls.connection_age_s
        if age_s and time.monotonic() - began_s > age_s / 2:  # see `mx.wire.server`
            return True
        found = self._validity(context)
        return found is not None and found.until_s - time.time() < _SOON_S

    def _why_not(self, context: Any) -> str:
        """Return why a call's connection is not trusted any more; "" if it is."""
        found = self._validity(context)
        if found is None or time.time() < found.until_s:
            return ""
        if found.until_s == -math.inf and not found.revoked:
            return f"this {self._what} does not trust the authority of your certificate any more"
        why = "is revoked" if found.revoked else "has expired"
        return f"your certificate, that of this connection to this {self._what}, {why}"

    def _validity(self, context: Any) -> Validity | None:
        """Return until when a call's certificate is valid; None without one."""
        if self._tls is None or self._authorities is None:
            return None
        about = context.auth_context()
        shown = (*about.get("x509_pem_cert", ()), *about.get("x509_pem_cert_chain", ()))
        if not shown:
            return None
        digest = hashlib.sha256(b"".join(shown)).digest()
        known = self._validities.get(digest)
        if known is None:
            from mx.core.certificates import Revocations, validity

            if len(self._validities) >= _MOST_KNOWN:
                self._validities.clear()
            known = validity(shown, self._authorities, self._revoked or Revocations())
            self._validities[digest] = known
            if time.time() < known.until_s < math.inf:
                self._ends_s.add(math.ceil(known.until_s))
        return known

    def caller(self, context: Any) -> Caller:
        """Return who makes a call. Raises as `require` if its certificate names no process, or is
        not valid any more."""
        try:
            if why := self._why_not(context):
                raise NotAllowedError(why, hint=_CHECK)
            return caller_of(context)
        except NotAllowedError as error:
            unknown = Caller(None, address_of_peer(context.peer()))
            self.refused(unknown, error, "call")
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
        self,
        who: Any,
        rights: tuple[Right, ...],
        model: str | None = None,
        *,
        action: str = "",
        granted: bool = True,
        **about: Any,
    ) -> Caller:
        """Return who makes a call, if he may do one of these things.

        Args:
            who: The call's servicer context, or the caller.
            rights: The rights, of which the first names what is refused.
            model: The model's name; None for any.
            action: What the audit line says that was asked for; "" for the first right.
            granted: Write that line also if he may; else the caller does, with what it knows.
            about: What the line says besides.

        Raises:
            NotAllowedError: He may not; or the other error that this was made with.
        """
        caller = who if isinstance(who, Caller) else self.caller(who)
        action, about = action or rights[0].value, {"model": model or "", **about}
        if not self.allows(caller, rights, model):
            error = self._error(caller, rights[0], model)
            self.refused(caller, error, action, **about)
            raise error
        if granted:
            self.granted(caller, action, **about)
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
            self.refused(caller, error, "call")
            raise error

    def _error(self, caller: Caller, right: Right, model: str | None) -> MxError:
        what = "any model" if model is None else f"{model[:_MOST_CHARACTERS]!r}"
        if model is not None and not self._by_name and not self.allows(caller, SEES, model):
            what = "that model"
        return self._kind(
            f"{caller.name} may not {_DOING[right]} {what}: the policy of this {self._what} has no "
            "rule for it",
            hint=f"ask who runs it for a rule with may = {right.value!r} in its `policy`",
        )

    def granted(
        self, caller: Caller, action: str, *, result: str = "granted", **about: Any
    ) -> None:
        """Write the audit line of what a caller was let do."""
        self.audit.write(caller.name, caller.address, action, result, **about)

    def refused(self, caller: Caller, error: MxError, action: str, **about: Any) -> None:
        """Write the audit line of a refusal: of a right, or by a budget."""
        about |= {"error": type(error).__name__, "text": error.message[:500]}
        self.audit.write(caller.name, caller.address, action, "refused", **about)

    def refused_call(self, context: Any, error: MxError) -> None:
        """Write the audit line of a call that a budget refuses."""
        if isinstance(error, CapacityError):
            with contextlib.suppress(NotAllowedError):
                self.refused(caller_of(context), error, "budget")

    def changed(self, what: str, result: str, **about: Any) -> None:
        """Write the audit line of a change of this process's policy or certificates."""
        self.audit.write("", "", what, result, **about)

    @contextmanager
    def standing(
        self, context: Any, rights: tuple[Right, ...], model: str, **about: Any
    ) -> Iterator[Caller]:
        """As `require`, and for as long as the block runs: it is cancelled when a new policy ends
        the right, or the connection is not trusted any more. For coroutines, not for generators.

        Raises:
            NotAllowedError: As `require`, and when the caller may not any more.
        """
        caller = self.require(context, rights, model, **about)
        task, ended = asyncio.current_task(), False
        assert task is not None

        def look() -> None:
            nonlocal ended
            may = self.allows(caller, rights, model) and not self._why_not(context)
            if not ended and not may:
                ended = True
                task.cancel()

        self._standing.add(look)
        try:
            yield caller
        except asyncio.CancelledError:
            if not ended or task.uncancel() > 0:
                raise
            why = self._why_not(context)  # what has another certificate has moved by now
            error = self._error(caller, rights[0], model)
            if why:
                error = self._kind(why, hint=_CHECK)
            self.refused(caller, error, rights[0].value, model=model or "", **about)
            raise error from None
        finally:
            self._standing.discard(look)

    def follow(self, listener: Callable[[], None]) -> None:
        """Call `listener` after each change of `version`."""
        self._listeners.append(listener)

    async def watch(self) -> None:
        """Read the policy again whenever its file changes, end what time ends, and write the audit
        lines of what was left out; runs until cancelled. A bad policy is logged, and the one of
        before holds."""
        from mx.wire.reloading import each_change

        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._look(), name="mx-audit")
                if self._path:
                    following = each_change([self._path], self._reread)
                    tasks.create_task(following, name="mx-policy-file")
        finally:
            self.audit.flush(math.inf)

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            self.audit.flush()
            if self._revoked is not None:
                await self._reread_revocations()
            now_s = time.time()
            if over := {each for each in self._ends_s if each <= now_s}:
                self._ends_s -= over
                self._changed()

    async def _reread_revocations(self) -> None:
        from mx import revocations

        assert self._tls is not None
        try:
            found = await in_thread(revocations.current, self._tls)
        except Exception:  # such as a thread that can't be started
            log.exception("the revocations of before hold")
            return
        if found != self._revoked:
            self._revoked = found
            self._validities.clear()
            self.changed("revocations", "read", revoked=len(found.serials))
            self._changed()

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
            self.changed("policy", "bad", policy=self._path, text=text)
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
