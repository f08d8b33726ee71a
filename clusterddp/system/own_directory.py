"""Directories in which no other user can put something else: trusted by owner and mode, never by name.

Who may write to a directory may rename what lies in it, so each directory and each link on the way to a path counts.
With the sticky bit (/tmp) users rename only what is theirs. A group that may write is other users, unless it is the
group of the owner's own name that most distributions give each user (mode 0775 is usual there).

This text is sent to SSH hosts before the boot (places/ssh/agent/boot.py): any Python has to be able to read it.
"""

import os
import shlex
import stat

SAFE_DIRECTORIES = "CLUSTERDDP_SAFE_DIRECTORIES"
"""The variable of directories whose writers a user trusts, as git's safe.directory; it reaches all nodes of a run."""
_MOST_LINKS = 40
_INSTEAD = "--runs DIR (CLUSTERDDP_RUNS) names one of your directories"


def find_fault(
    path: "str | os.PathLike[str]", *, private: bool = False, instead: str = _INSTEAD
) -> "tuple[str, str] | None":
    """Return why other users could replace what lies below a directory, and the remedy; None: they cannot.

    What does not exist yet has no fault, nor has what lies above or below one of `SAFE_DIRECTORIES`. `private`: the
    directory itself is this user's, and nobody else writes there. `instead`: names another directory.
    Raises: OSError: a directory cannot be reached.
    """
    here, pending, links = "/", os.path.join(os.getcwd(), os.fspath(path)).split("/"), 0
    trusted = _trusted_owners()
    while True:
        try:
            found = os.lstat(here)
        except FileNotFoundError:
            return None
        if stat.S_ISLNK(found.st_mode) and links < _MOST_LINKS:
            links += 1
            pending = os.readlink(here).split("/") + pending
            parent = "/" if pending[0] == "" else os.path.dirname(here)
        else:
            parent = here
        last = not any(pending)
        judge = _fault_of_private if private and last else _fault_of
        fault = None if _is_safe(here) else judge(here, found, trusted, instead)
        if last or fault is not None:
            return fault
        here = os.path.normpath(os.path.join(parent, pending.pop(0)))


def demand_own(path: "str | os.PathLike[str]", *, private: bool = False) -> None:
    """Check that no other user can replace what lies below a directory, before anything is started from there.

    A directory that cannot be reached passes: whatever uses it next says why.
    Raises: ClusterddpError: somebody can; see `find_fault`.
    """
    from clusterddp.errors import ClusterddpError

    try:
        fault = find_fault(path, private=private)
    except OSError:
        return
    if fault is not None:
        raise ClusterddpError(fault[0], hint=fault[1])


def _fault_of(place: str, found: os.stat_result, trusted: "set[int]", instead: str) -> "tuple[str, str] | None":
    """Judge one directory, or link, on the way."""
    owner = account_name(found.st_uid)
    if found.st_uid not in trusted:
        remedy = f"{instead}; or, if you trust {owner}, {_trusting(place)}"
        remedy += "; NFS shows this owner, too, where it cannot name one" if owner == "nobody" else ""
        return f"{place} belongs to {owner}, who can replace the files of runs below it", remedy
    who = other_writers(found)
    if who is None or stat.S_ISLNK(found.st_mode) or found.st_mode & stat.S_ISVTX:
        return None
    what = f"{place} (mode {stat.S_IMODE(found.st_mode):04o}): {who} can replace the files of runs below it"
    typed = "" if found.st_uid == os.geteuid() else f", typed by {owner}"
    remedy = f"chmod +t {place}{typed}: each user then replaces only files of their own; or {instead}"
    return what, f"{remedy}; or, if you trust all who can write there, {_trusting(place)}"


def _is_safe(place: str) -> bool:
    """Return whether the user has said that everybody is trusted who can write to a directory."""
    safe = [os.path.normpath(each) for each in os.environ.get(SAFE_DIRECTORIES, "").split(os.pathsep) if each]
    return any(os.path.commonpath([each, place]) in (each, place) for each in safe if os.path.isabs(each))


def _trusting(place: str) -> str:
    """Return the command by which the user says so."""
    return f"export {SAFE_DIRECTORIES}={shlex.quote(place)}"


def _fault_of_private(place: str, found: os.stat_result, trusted: "set[int]", instead: str) -> "tuple[str, str] | None":
    if found.st_uid != os.geteuid():
        return f"{place} belongs to {account_name(found.st_uid)}, and has to be yours", instead
    who = other_writers(found)
    return None if who is None else (f"{place}: {who} can write there", f"chmod go-w {place}")


def other_writers(found: os.stat_result) -> "str | None":
    """Return who besides the owner may write, for people; None: nobody, or only the owner's own group."""
    if found.st_mode & stat.S_IWOTH:
        return "every user"
    if found.st_mode & stat.S_IWGRP and not _is_own_group(found):
        return f"group {account_name(found.st_gid, group=True)}"
    return None


def _trusted_owners() -> "set[int]":
    """Return this user, root, and in a user namespace the number by which it shows root, as every foreign user."""
    owners = {0, os.geteuid()}
    try:
        with open("/proc/self/uid_map") as mapped, open("/proc/sys/kernel/overflowuid") as overflow:
            if mapped.read().split() != ["0", "0", "4294967295"]:
                owners.add(int(overflow.read()))
    except OSError:
        pass
    return owners


def _is_own_group(found: os.stat_result) -> bool:
    """Return whether a group has the name of the owner, or of this user, and no member besides the two."""
    import grp
    import pwd

    try:
        group = grp.getgrgid(found.st_gid)
        names = {pwd.getpwuid(uid).pw_name for uid in (found.st_uid, os.geteuid())}
    except KeyError:
        return False
    return group.gr_name in names and names.issuperset(group.gr_mem)


def account_name(number: int, *, group: bool = False) -> str:
    """Return the name of a user, or group, of this host, or `uid 1000`."""
    import grp
    import pwd

    try:
        return grp.getgrgid(number).gr_name if group else pwd.getpwuid(number).pw_name
    except (KeyError, OverflowError):
        return f"{'gid' if group else 'uid'} {number}"
