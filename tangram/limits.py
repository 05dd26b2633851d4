"""Every bound of the system, with its reason. Units are last in each name."""

from typing import Final

# --- names -----------------------------------------------------------------------------------------------------
NAME_LENGTH_MAX: Final = 64
"""Names become subject tokens, file names and cgroup names; the longest subject stays under 300 characters."""

# --- messages --------------------------------------------------------------------------------------------------
ENVELOPE_BYTES_MAX: Final = 512 * 1024
"""Items of one message. The server's max_payload is 1 MiB and headers count against it."""
ITEM_BYTES_MAX: Final = 384 * 1024
"""Inline payload of one item; a larger one has to travel as a blob."""
ENVELOPE_ITEMS_MAX: Final = 1_000
"""Keeps one decode, one fold step and one redelivery short."""
SPEC_BYTES_MAX: Final = 16 * 1024
"""Of an action's spec; what users fill is in its payload."""
NONCE_BYTES: Final = 8
ARGUMENT_BYTES_MAX: Final = 64 * 1024
"""Linux refuses a single argument of 128 KiB (MAX_ARG_STRLEN) in a way that looks like the program failed."""
ARGUMENTS_BYTES_MAX: Final = 1024 * 1024
ENVIRONMENT_BYTES_MAX: Final = 32 * 1024
ENVIRONMENT_COUNT_MAX: Final = 100
PATH_BYTES_MAX: Final = 4_096
OUTPUT_BYTES_MAX: Final = 180 * 1024
"""Kept of each of stdout and stderr (head and tail); both together must fit ITEM_BYTES_MAX."""
OUTPUT_KILL_BYTES: Final = 1 << 30
"""A program that has written this much is ended with outcome `output_limit`."""
DETAIL_LENGTH_MAX: Final = 500
"""A reason is for people; it must not turn a result into a payload."""

# --- time ------------------------------------------------------------------------------------------------------
TIMEOUT_MS_MAX: Final = 24 * 3_600_000
TIMEOUT_MS_DEFAULT: Final = 300_000
DEADLINE_MS_MAX: Final = 7 * 24 * 3_600_000
DEADLINE_MS_DEFAULT: Final = 3_600_000
SESSION_IDLE_MS_DEFAULT: Final = 3_600_000
LOG_TIME_STEP_NS_MAX: Final = 2_000_000_000
"""How far one message can move log time: a clock that jumps must not expire everything at once."""
TICK_NS: Final = 1_000_000_000
TIMER_GRAIN_NS: Final = 50_000_000
"""Timers fall due in steps of this size, so that they cost at most 20 ticks a second."""
KILL_BUDGET_MS: Final = 5_000
PROCESSES_MAX: Final = 4_096
"""Processes and threads of a session: more than any build or test run needs, and well below the 32,768 that small hosts have
in all, so that a fork bomb leaves its neighbours some."""
BACKSTOP_GRACE_MS: Final = 30_000
"""After time-out + start-up + kill budget + this, an action without an answer is `lost`."""
STARTUP_MS_MAX: Final = 600_000
"""Making a session (pulling an image) may take this long before its time-out starts."""
CLIENT_TTL_NS: Final = 24 * 3_600 * 1_000_000_000
"""A client without open actions is forgotten after this."""

# --- state -----------------------------------------------------------------------------------------------------
CLIENT_SEEN_WIDTH_MAX: Final = 65_536
"""Ids a client may have above its `done_below`; bounds the memory that one client costs the core."""
ATTEMPTS_MAX: Final = 3
CANDIDATES_MAX: Final = 2_048
"""Actions one pass considers: the paper's largest batch."""
RESOURCES_PER_ACTION_MAX: Final = 8
LEGAL_AMOUNTS_MAX: Final = 32
AMOUNT_MAX: Final = 1 << 40
CORE_ID_MAX: Final = 16_383
"""Sets of cores are integers of that many bits; one id from the wire must not become a gigabyte."""
NUMA_NODES_MAX: Final = 256

# --- shells ----------------------------------------------------------------------------------------------------
PAYLOAD_CACHE_BYTES: Final = 256 * 1024 * 1024
"""Payloads of pending actions that the scheduler's shell keeps at hand; the rest is read back from the log."""
ACK_WAIT_S: Final = 2.0
CONSUMER_ACK_PENDING_MAX: Final = 100_000
HEARTBEAT_S: Final = 1.0
