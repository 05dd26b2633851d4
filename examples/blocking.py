"""The same client in a script, without an event loop. Start `tangram up` first."""

import tangram

with tangram.Client.blocking(task="script") as client:
    result = client.run("seq 8 | xargs -P $TANGRAM_UNITS -I{} sh -c 'sleep 0.2; echo {}'", units=(1, 8), parallel=1.0)
    print(f"{result.units} cores, {result.run_s:.2f} s, {result.outcome}")
    print(result.text)
