"""An agent that searches through a rate-limited API and has what it found judged on a GPU.

    tangram up --endpoints endpoints.toml --quota search=requests:10/1,burst:5 \\
        --services services.toml --cpu-sim 1 --gpu-memory 1GiB

    # endpoints.toml                                    # services.toml: on PYTHONPATH, tensors included
    [endpoints.search]                                  [services.judge]
    url = "https://search.example/v1?q={q}"             factory = "my_package.judges:make"
    takes = { search = 1 }

However many of these run, and on however many executors, the provider never sees more than ten requests a second.
"""

import asyncio

import tangram


async def trajectory(client: tangram.Client, question: str) -> float:
    pages = []
    for page in range(3):
        try:
            pages.append(await client.call("search", {"q": question, "page": page}, timeout=20))
        except tangram.CallError as error:
            if error.result.is_verdict:  # the provider has answered: there is no such page
                break
            raise  # nobody's fault but ours: the step is to be masked
    (score,) = await client.score("judge", [f"{question}: {pages}"])
    return score


async def main() -> None:
    async with tangram.Client(task="deepsearch") as client:
        questions = ["why are there tides", "who baked the first bread"]
        print(await asyncio.gather(*(trajectory(client, question) for question in questions)))


if __name__ == "__main__":
    asyncio.run(main())
