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
ARGUMENTS_COUNT_MAX: Final = 4_096
"""More belong into a file; a list is gone through several times on its way."""
ENVIRONMENT_BYTES_MAX: Final = 32 * 1024
ENVIRONMENT_COUNT_MAX: Final = 100
PATH_BYTES_MAX: Final = 4_096
OUTPUT_BYTES_MAX: Final = 180 * 1024
"""Kept of each of stdout and stderr (head and tail) unless more is asked for; both together must fit ITEM_BYTES_MAX."""
OUTPUT_KEPT_BYTES_MAX: Final = 32 * 1024 * 1024
"""The most that can be asked for; both together must fit BLOB_BYTES_MAX."""
OUTPUT_HELD_BYTES_MAX: Final = 512 * 1024 * 1024
"""What an executor holds of all its programs' output beyond OUTPUT_BYTES_MAX each: on a host with hundreds of cores, all of
them asking for the most would take tens of gigabytes of it."""
FILE_BYTES_MAX: Final = 64 * 1024 * 1024
"""Of a file that is written or read in one action."""
OUTPUT_KILL_BYTES: Final = 1 << 30
"""A program that has written this much is ended with outcome `output_limit`."""
DETAIL_LENGTH_MAX: Final = 500
"""A reason is for people; it must not turn a result into a payload."""

# --- blobs -----------------------------------------------------------------------------------------------------
BLOB_BYTES_MAX: Final = 80 * 1024 * 1024
"""A file of FILE_BYTES_MAX, or two streams of OUTPUT_KEPT_BYTES_MAX, with what stands around them. Clients and executors hold
one whole, a few times over, and nothing is run in parts: what is larger belongs into an image or onto a shared disk."""
BLOB_PIECE_BYTES: Final = 512 * 1024
"""As an envelope: the server's max_payload is 1 MiB."""
BLOB_PIECES_MAX: Final = 1_024
"""Of a blob that a later version may cut smaller; bounds the questions that one name can cause."""
BLOB_PIECES_IN_FLIGHT: Final = 8
"""Of one connection, each way: 4 MiB fill a link of 10 Gbit/s for 3 ms, and what else is said waits behind no more."""
BLOBS_AT_ONCE: Final = 4
"""Encoded or decoded at the same time by one client or executor: 4 x BLOB_BYTES_MAX, a few times over, is what it costs."""
BLOB_STALL_S: Final = 20.0
"""Without a piece stored or read for so long, while there is a connection, a blob is given up."""
BLOB_YOUNG_S: Final = 6 * 3_600.0
"""One that was stored so short a time ago is not stored again: the stream keeps it for the longest deadline and a day."""
BLOB_MS_MAX: Final = 120_000
"""An executor gives a payload, and an output, so much time on its way; then the action ends without."""

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
QUOTA_GRAIN_NS: Final = 20_000_000
"""While somebody waits for a quota log time moves in steps of at least this size: of 50 requests a second each goes in time."""
DESCRIPTORS_RESERVED: Final = 64
"""An executor starts nothing while it has fewer than these left: ending what runs, files and the broker take some too."""
REFUSAL_S: Final = 1.0
"""What could not be begun is given back after this, with its units held: at once, its refusals would be used up in no time."""
KILL_BUDGET_MS: Final = 5_000
PROCESSES_MAX: Final = 4_096
"""Processes and threads of a session: more than any build or test run needs, and well below the 32,768 that small hosts have
in all, so that a fork bomb leaves its neighbours some."""
BACKSTOP_GRACE_MS: Final = 30_000 + 2 * BLOB_MS_MAX
"""After time-out + kill budget + this, an action without an answer is `lost`. Its payload and its output may be blobs."""
STARTUP_MS_MAX: Final = 600_000
"""Making a session (pulling an image) may take this long before its time-out starts."""
CLIENT_TTL_NS: Final = 24 * 3_600 * 1_000_000_000
"""A client without open actions is forgotten after this."""

KEY_TTL_NS: Final = 3_600 * 1_000_000_000
"""A caller's own key stands for its action so long after its end: longer than anybody retries."""

# --- state -----------------------------------------------------------------------------------------------------
NUMBER_MAX: Final = 1 << 62
"""Of ids, sequences and other counters: far below where languages and formats differ."""
KEY_LENGTH_MAX: Final = 200
KEYS_PER_CLIENT_MAX: Final = 65_536
"""Keys that one client may have in use; some 20 MB of the scheduler's memory."""
CLIENT_SEEN_WIDTH_MAX: Final = 65_536
"""Ids a client may have above its `done_below`; bounds the memory that one client costs the core."""
ATTEMPTS_MAX: Final = 3
MODEL_SIZES_MAX: Final = 32
"""Sizes that a model remembers; the one with the least weight makes room."""
MODELS_MAX: Final = 10_000
"""Elasticity models, about 2 KB each; kinds are named by users, who might name them all differently."""
CANDIDATES_MAX: Final = 2_048
"""Actions one pass considers: the paper's largest batch."""
SHARE_MAX: Final = 1_000_000
"""Of a task's weight: finer than any cluster has cores."""
SHARES_MAX: Final = 1_000
"""Tasks with a weight of their own; all of them stand in the leader's record."""
BACKFILL_MAX: Final = 64
"""Actions looked at that might start before a wide one that waits; more are worth nothing, and a pass has to end."""
RESOURCES_PER_ACTION_MAX: Final = 8
LEGAL_AMOUNTS_MAX: Final = 32
AMOUNT_MAX: Final = 1 << 40
CORE_ID_MAX: Final = 16_383
"""Sets of cores are integers of that many bits; one id from the wire must not become a gigabyte."""
NUMA_NODES_MAX: Final = 256
GPU_ID_MAX: Final = 63
"""Sets of GPUs of a host are integers of 64 bits."""
SERVICES_MAX: Final = 256
QUOTAS_MAX: Final = 256

PENDING_MAX: Final = 200_000
"""Open actions (about 1.3 KB each) beyond which submissions are refused; the setting `pending_max` changes it."""
PENDING_MIB_MAX: Final = 256
"""Their payloads together: a checkpoint carries them, and its stream (1 GiB) has to hold three; `pending_mib_max`."""
REFUSED_MS_MAX: Final = 300_000
"""A provider that wants to be left alone for longer is asked again after this."""
RETRY_AFTER_MS: Final = 5_000
"""Told to whoever is refused because there is too much."""

# --- the log's size, in parts of its max_bytes ------------------------------------------------------------------
LOG_KEEP: Final = 0.5
"""What a trim leaves, as history for replay and for clients that come back late."""
LOG_TRIM: Final = 0.6
LOG_REOPEN: Final = 0.7
LOG_CLOSE: Final = 0.8
"""From here on submissions are refused, so that outcomes and decisions have the rest."""
LOG_LEND: Final = 0.95
LOG_RESERVE: Final = 0.125
"""What is added for outcomes when even that is nearly used up."""
CHECKPOINTS_MAX: Final = 16
CHECKPOINTS_PART: Final = 0.3
"""Of their stream's max_bytes, for those that are kept; a new one needs as much again."""
CHECKPOINT_PART: Final = 1 / 16
CHECKPOINT_BYTES_MAX: Final = 128 * 1024 * 1024
"""How much the log grows between checkpoints: 100,000 actions or so, which a scheduler reads in a few seconds."""

# --- shells ----------------------------------------------------------------------------------------------------
PAYLOAD_CACHE_BYTES: Final = 128 * 1024 * 1024
"""Payloads of pending actions that the scheduler's shell keeps at hand; the rest is read back from the log. With the state of
100,000 actions (150 MB) and a checkpoint on its way it stays under 500 MB."""
ASKS_WAITING_MAX: Final = 4_096
"""Questions, one a client, that a scheduler keeps while it reads up to them: 40 KB each at most. Beyond, the oldest is dropped,
and its client asks again."""
MODELS_EXPORT_S: Final = 10.0
MODELS_EXPORTED_MAX: Final = 256
"""Of those that have changed since, what one export writes: a quarter of a second of a broker that syncs each message."""
ACK_WAIT_S: Final = 2.0
CONSUMER_ACK_PENDING_MAX: Final = 100_000
HEARTBEAT_S: Final = 1.0

# --- simulation ------------------------------------------------------------------------------------------------
SIMULATED_HOSTS_MAX: Final = 4_096
"""A pass looks at every host; a digit too many in --pool must not look like a hang."""
SIMULATED_IDLE_TICKS_MAX: Final = 60
"""Seconds of virtual time in which the scheduler may leave actions waiting while nothing runs and nothing is to come."""
