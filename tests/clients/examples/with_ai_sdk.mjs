// The AI SDK: texts, streams, objects by a zod schema, and tools of two turns, over all three APIs.
import assert from "node:assert";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, Output, stepCountIs, streamObject, streamText, tool } from "ai";
import { z } from "zod";

const baseURL = process.argv[2];
const compatible = createOpenAICompatible({ name: "onesweep", baseURL, supportsStructuredOutputs: true, includeUsage: true });
const openai = createOpenAI({ baseURL, apiKey: "none" });
const schema = z.object({ sure: z.boolean() });
const weather = tool({
  description: "The weather",
  inputSchema: z.object({ now: z.boolean() }),
  execute: async () => "sunny",
});
// the likeliest tokens: what a random model draws may be an end at once
const ask = { prompt: "hi", maxRetries: 0, temperature: 0 };

for (const model of [compatible("onesweep"), openai.chat("onesweep"), openai("onesweep")]) {
  const { text, usage } = await generateText({ model, ...ask, maxOutputTokens: 20 });
  assert(text && usage.outputTokens > 0);
  const { object } = await generateObject({ model, schema, ...ask });
  assert.equal(typeof object.sure, "boolean");
  const { output } = await generateText({ model, output: Output.object({ schema }), ...ask });
  assert.equal(typeof output.sure, "boolean");
  const streamed = streamObject({ model, schema, ...ask, maxOutputTokens: 60 });
  for await (const _ of streamed.partialObjectStream);
  assert.equal(typeof (await streamed.object).sure, "boolean");
  const tools = { weather };
  const called = await generateText({ model, tools, toolChoice: "required", ...ask });
  assert.equal(called.toolResults[0].output, "sunny");
  const either = { model, tools, output: Output.object({ schema }), ...ask };
  assert((await generateText({ ...either, toolChoice: "required" })).toolResults.length);
  const messages = [{ role: "user", content: "hi" }, ...called.response.messages];
  const stream = streamText({ model, tools, messages, maxOutputTokens: 20, maxRetries: 0, temperature: 0, onError({ error }) { throw error; } });
  let parts = 0;
  for await (const part of stream.textStream) parts += part.length > 0;
  assert(parts > 0);
  const steps = streamText({ model, tools, toolChoice: "required", stopWhen: stepCountIs(2), ...ask });
  assert.equal((await steps.steps).length, 2);
}
for (const model of [compatible.completionModel("onesweep"), openai.completion("onesweep")]) {
  const { text } = await generateText({ model, ...ask, maxOutputTokens: 20 });
  assert(text);
}
