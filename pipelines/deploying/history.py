"""Commits of an environment's values file. Nothing here pushes: who may do that is for the repository to say."""

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from components.common.errors import EngineryError, UserError
from pipelines.deploying.environments import Pins, pins_of

ROLLBACK = "Enginery-Rollback"  # trailer of a commit that goes back
_MAX_COMMITS = 1000  # of a file, that are looked through


@dataclass(frozen=True, kw_only=True)
class Checkout:
    """A work tree of git."""

    root: Path

    @classmethod
    def around(cls, file: Path) -> "Checkout":
        """The one that a file is in.

        Raises:
            UserError: there is none, git is not installed, or the file is not in git.
        """
        folder = file.resolve().parent
        try:
            done = _git(folder, "rev-parse", "--show-toplevel")
        except FileNotFoundError:
            raise UserError("git is not installed, and deployments are commits; install it") from None
        if done.returncode:
            raise UserError(
                f"{folder} is in no git repository ({done.stderr.strip()}), and deployments are commits. Run this in "
                "your checkout"
            )
        checkout = cls(root=Path(done.stdout.strip()))
        if _git(checkout.root, "ls-files", "--error-unmatch", "--", str(file.resolve())).returncode:
            raise UserError(f"{file} is not in git yet; commit it first: git add {file}")
        return checkout

    def check_branch(self) -> None:
        """A commit that is on no branch is on nobody's way to the cluster.

        Raises:
            UserError: HEAD is detached, as after `git checkout COMMIT`, in a rebase, and in most CI systems.
        """
        if _git(self.root, "symbolic-ref", "--quiet", "HEAD").returncode:
            raise UserError(
                f"{self.root} is on no branch (HEAD is detached), so the commit of a deployment would be lost. "
                "Switch to the branch that the cluster follows, or one for a review: git switch BRANCH"
            )

    def is_whole(self) -> bool:
        """Whether all commits are here; CI systems often fetch the last one alone."""
        return self._asked("rev-parse", "--is-shallow-repository").strip() != "true"

    def check_clean(self, file: Path) -> None:
        """What is committed must be this change alone.

        Raises:
            UserError: the file has changes that are not committed.
        """
        status = self._asked("status", "--porcelain", "--", str(file.resolve())).strip()
        if status:
            raise UserError(
                f"{file} has changes that are not committed ({status.split()[0]}), and a deployment is a commit of its "
                f"own. Commit them, or take them back: git checkout -- {file}"
            )

    def commit(self, file: Path, subject: str, body: Sequence[str]) -> str:
        """Commit one file, whatever else is staged.

        Returns:
            The commit's id.

        Raises:
            EngineryError: git refused. The file is then as it was committed before.
        """
        message = "\n\n".join([subject, *body])
        done = _git(self.root, "commit", "--quiet", "--only", "--message", message, "--", str(file.resolve()))
        if done.returncode:
            _git(self.root, "checkout", "--quiet", "HEAD", "--", str(file.resolve()))
            reason = " ".join((done.stderr or done.stdout).split())
            raise EngineryError(f"git did not commit {file}, which is now as before: {reason}")
        return self._asked("rev-parse", "--short", "HEAD").strip()

    def past(self, file: Path) -> list[Pins]:
        """What an environment has run, the oldest first, the present last; without what a rollback went back over."""
        name = file.resolve().relative_to(self.root.resolve()).as_posix()
        form = f"%H %(trailers:key={ROLLBACK},valueonly,separator=%x2C)"
        log = self._asked("log", f"--max-count={_MAX_COMMITS}", f"--format={form}", "--", name)
        stack: list[Pins] = []
        for line in reversed(log.splitlines()):
            commit, _, trailer = line.partition(" ")
            shown = _git(self.root, "show", f"{commit}:{name}")
            if shown.returncode:  # deleted in this commit
                continue
            try:
                pins = pins_of(shown.stdout, f"{commit[:10]}:{name}")
            except UserError:  # somebody committed a broken file, and mended it later
                continue
            if stack and stack[-1] == pins:
                continue
            if trailer and pins in stack:
                del stack[len(stack) - stack[::-1].index(pins) :]
            else:
                stack.append(pins)
        return stack

    def _asked(self, *arguments: str) -> str:
        done = _git(self.root, *arguments)
        if done.returncode:
            raise EngineryError(f"git {arguments[0]} failed in {self.root}: {' '.join(done.stderr.split())}")
        return done.stdout


def _git(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True)
