"""Two hundred commands that an agent might run, in an order in which they build on each other's files.

Left out, because they cannot be equal: what shows the process (pid, the whole environment, the host's folders), and background
processes that keep the output open (the local environment waits for them until its time-out).
"""

from dataclasses import dataclass
from typing import Final

ENV: Final = {"GREETING": "hello wörld", "EMPTY": "", "QUOTES": "a 'b' \"c\" $d `e`", "LC_ALL": "C.UTF-8", "LINES_2": "a\nb"}


@dataclass(frozen=True)
class Case:
    """cwd: below the environment's own folder, or absolute."""

    command: str
    cwd: str = ""
    timeout: float | None = None


def _exits() -> list[Case]:
    codes = (0, 1, 2, 3, 7, 42, 100, 124, 125, 126, 127, 128, 130, 137, 143, 254, 255)
    signals = ("TERM", "KILL", "INT", "SEGV", "ABRT", "HUP", "PIPE", "USR1")
    commands = [f"exit {code}" for code in codes] + [f"echo before {code}; (exit {code})" for code in codes]
    commands += [f"echo dying; kill -{name} $$" for name in signals] + [f"sh -c 'kill -{name} $$'" for name in signals]
    commands += [
        "", " ", "\n", "true", "false", "! true", "no-such-program", "./no-such-file", "/etc", "/etc/passwd",
        "cd /no/such/folder", "cat no-such-file", "set -e; false; echo not reached", "false | true", "true | false",
        "false || echo rescued", "true && echo went on", "exec true", "exec no-such-program", "if", "echo 'unfinished", "fi",
        "(", "set -u; echo $NEVER_SET", "trap 'echo trapped' EXIT; exit 9", "return 5",
    ]  # fmt: skip
    return [Case(command) for command in commands]


def _streams() -> list[Case]:
    commands = [
        "echo out; echo err >&2", "echo err >&2; echo out", "echo err >&2; exit 3", "printf 'no newline'", "printf ''",
        "for i in 1 2 3 4 5 6 7 8; do echo out $i; echo err $i >&2; done", "echo a >&2 | cat", "echo hidden 2>/dev/null >&2",
        "echo one; sh -c 'echo two >&2'; echo three", "(echo a; echo b >&2) 2>&1 | tr a-z A-Z",
        "exec 2>/dev/null; echo gone >&2", "exec >&2; echo to stderr", "echo to fd 3 >&3", "exec 3>&1; echo through 3 >&3",
        "echo closed >&-", "cat", "cat -", "wc -c", "read line; echo \"got <$line>\"", "test -t 0; echo $?",
        "test -t 1; echo $?", "test -t 2; echo $?",
        "python3 -c 'import sys; print(1, flush=True); print(2, file=sys.stderr, flush=True); print(3)'",
        "python3 -c 'import sys; sys.exit(\"a message\")'", "python3 -c 'raise ValueError(1)'",
        "python3 -c 'import os; os.abort()'", "python3 - <<'EOF'\nprint('from a heredoc')\nEOF", "ls /dev/null no-such-file",
        "echo COMPLETE_TASK", "set -x; echo traced",
    ]  # fmt: skip
    return [Case(command) for command in commands]


def _bytes() -> list[Case]:
    commands = [
        r"printf '\377\376\000x'", r"printf '\303'", r"printf '\303\050'", r"printf '\360\237\230'", r"printf '\355\240\200'",
        r"printf 'a\r\nb\rc\n\r'", r"printf '\r'", r"printf '\0'", r"printf '\033[31mred\033[0m\n'",
        r"printf '\302\205|\342\200\250'", r"printf '\357\273\277bom'", "echo 日本語 ünï 🎉", "echo 日本語 >&2",
        "printf '%s' '🎉' | wc -c", "echo \"$GREETING\"", "echo 'tab\there'", "cat /bin/true | head -c 300",
        "head -c 4096 /dev/zero", "seq 1 20000", "seq 1 20000 >&2", "yes | head -n 50000",
        "head -c 150000 /dev/zero | tr '\\0' x", "printf 'é%.0s' $(seq 1 20000)", "yes '🎉' | head -n 9000",
        "seq 1 3000 | while read n; do echo $n; done",
        "i=0; while [ $i -lt 500 ]; do echo $i; echo e$i >&2; i=$((i+1)); done",
        "python3 -c 'import os; os.write(1, bytes(range(256)))'", "printf 'form\\ffeed\\vtab'",
    ]  # fmt: skip
    return [Case(command) for command in commands]


def _quoting() -> list[Case]:
    commands = [
        "echo \"double 'single' inside\"", "echo 'single \"double\" inside'", "echo it\\'s", "echo $((1 + 2 * 3))",
        "echo `echo nested`", "echo $(echo $(echo deep))", "echo \"$QUOTES\"", "echo $QUOTES", "echo \"[$EMPTY]\"",
        "echo \"$LINES_2\"", "echo $LINES_2", "echo \\$HOME '$HOME'", "echo a\\\nb", "echo '#' not a comment # a comment",
        "echo *no-match*", "echo {a,b}", "echo !!", "echo ~nobody", "X='a b'; echo $X; echo \"$X\"", "echo \"\\\\n\"",
        "printf '%s\\n' 'a;b' 'c|d' 'e&f' '<g>'", "echo -n; echo -e 'x\\ty'", "echo --", "-echo",
        "echo \"${GREETING#hello }\"", "echo ${NEVER_SET:-default}", "cat <<EOF\n$GREETING $((2+2))\nEOF",
        "cat <<'EOF'\n$GREETING $((2+2)) `x` \\\\\nEOF", "cat <<-EOF\n\tindented\n\tEOF",
        "cat <<A; cat <<B\nfirst\nA\nsecond\nB", "cat <<EOF", "echo " + "x" * 10_000, "# nothing but a comment",
        "echo " + "w " * 30_000 + "| wc -w", ": " + "ö" * 40_000 + "; echo eighty thousand bytes",
        ": '" + "q" * 131_060 + "'; echo almost too long", ": " + "y" * 131_070, "echo a\0b", "echo \ud800",
    ]  # fmt: skip
    return [Case(command) for command in commands]


def _files() -> list[Case]:
    cases = [
        Case(command)
        for command in (
            "pwd", "ls -A", "mkdir -p sub/deep 'with space' && ls", "echo one > a.txt; cat a.txt",
            "echo two >> a.txt; cat a.txt",
            "cat <<'EOF' > prog.py\nimport sys\nprint('args', sys.argv[1:])\nsys.exit(len(sys.argv) - 1)\nEOF",
            "python3 prog.py", "python3 prog.py a 'b c'", "sed -i 's/one/1/' a.txt && cat a.txt",
            "nl -ba a.txt | sed -n '1,2p'", "grep -rn two . | sort", "grep nothing a.txt", "cd sub && pwd", "pwd",
            "export LATER=1; LOCAL=2", "echo \"[$LATER$LOCAL]\"", "umask", "chmod 600 a.txt; stat -c %a a.txt",
            "chmod 000 sub/deep; stat -c %a sub/deep", "ln -s a.txt link; readlink link; cat link",
            "printf '#!/bin/sh\\necho script $1\\n' > s.sh; chmod +x s.sh; ./s.sh x", "printf 'x' > noexec; ./noexec",
            "find . -type f | sort", "rm no-such-file", "wc -c < a.txt", "tee copy.txt < a.txt",
            "diff a.txt copy.txt && echo same", "diff a.txt prog.py | head -n 3", "tar cf - a.txt | tar tf -",
        )
    ]  # fmt: skip
    cases += [
        Case("pwd; ls", cwd="sub"), Case("pwd", cwd="with space"), Case("cat ../a.txt", cwd="sub"), Case("pwd", cwd="/"),
        Case("pwd", cwd="/tmp"), Case("echo never", cwd="/no/such/folder"), Case("echo never", cwd="no-such-folder"),
        Case("exit 126", cwd="sub"),
    ]  # fmt: skip
    return cases


def _processes() -> list[Case]:
    return [
        Case("sleep 60", timeout=0.3),
        Case("echo partial; echo error >&2; sleep 60", timeout=0.4),
        Case("printf 'half\\r\\na line é'; sleep 60 & wait", timeout=0.4),
        Case("trap '' TERM INT; echo stubborn; while :; do sleep 1; done", timeout=0.5),
        Case("sleep 0.05; echo in time", timeout=5),
        Case("nohup sleep 2 >/dev/null 2>&1 & echo started"),
        Case("(sleep 0.1; echo late > late.txt) >/dev/null 2>&1 & echo now"),
        Case("while [ ! -s late.txt ]; do sleep 0.02; done; cat late.txt"),
        Case("sleep 0.1 & wait $!; echo waited $?"),
        Case("(exit 3) & wait $!; echo $?"),
        Case("echo child & wait"),
    ]


CASES: Final = [*_files(), *_exits(), *_streams(), *_bytes(), *_quoting(), *_processes()]
