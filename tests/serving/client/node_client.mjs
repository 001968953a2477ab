// A client of router and hosts that shares nothing with ours but proto/. Prints what it was told, as JSON.
// Arguments: a folder with node_modules, proto/, the health service's descriptor, the router, a host, a prompt, their tokens.
import { createRequire } from "node:module";
import { readFileSync } from "node:fs";

const [modules, protos, health, router, host, prompt, ...tokens] = process.argv.slice(2);
const require = createRequire(`${modules}/`);
const grpc = require("@grpc/grpc-js");
const loader = require("@grpc/proto-loader");
const options = { keepCase: true, longs: String, enums: String, includeDirs: [protos] };
const { v1: serving } = grpc.loadPackageDefinition(loader.loadSync("serving/v1/router.proto", options)).serving;
const { v1: stages } = grpc.loadPackageDefinition(loader.loadSync("stages/v1/stage.proto", options)).stages;
const { v1: checks } = grpc.loadPackageDefinition(
  loader.loadFileDescriptorSetFromBuffer(readFileSync(health), options),
).grpc.health;
const plain = grpc.credentials.createInsecure();
const deadline = () => ({ deadline: Date.now() + 60_000 });

const [forRouter, forHost] = tokens.map((token) => {
  const shown = new grpc.Metadata();
  shown.set("authorization", `Bearer ${token}`);
  return shown;
});
const texts = new serving.RouterService(router, plain);

function generate(request, afterFirst = () => {}) {
  return new Promise((resolve) => {
    const call = texts.Generate({ prompt: Buffer.from(prompt), ...request }, forRouter, deadline());
    const pieces = [];
    let summary = null;
    call.on("data", (each) => {
      if (each.text) pieces.push(each.text);
      if (each.summary) summary = each.summary;
      afterFirst(call);
    });
    call.on("error", () => {}); // its status comes below
    call.on("status", ({ code, details, metadata }) => {
      const text = Buffer.concat(pieces).toString("hex");
      resolve({ code, details, metadata: metadata.getMap(), text, pieces: pieces.length, summary });
    });
  });
}

const unary = (client, method, request, shown = new grpc.Metadata()) =>
  new Promise((resolve, reject) =>
    client[method](request, shown, deadline(), (error, answer) => (error ? reject(error) : resolve(answer))),
  );

const told = { sweep: await generate({ mode: "sweep", max_bytes: 24, seed: 5 }) };
told.ar = await generate({ mode: "ar", max_bytes: 24, seed: 5 });
told.cancelled = await generate({ mode: "ar", max_bytes: 400 }, (call) => call.cancel());
told.refused = await generate({ mode: "sweep", max_bytes: 24, steps: 1000 });
told.status = await unary(texts, "Status", {}, forRouter);
told.host = await unary(new stages.StageService(host, plain), "Describe", {}, forHost);
for (const [name, address, service] of [
  ["router_health", router, "serving.v1.RouterService"],
  ["host_health", host, "stages.v1.StageService"],
])
  told[name] = (await unary(new checks.Health(address, plain), "Check", { service })).status;
console.log(JSON.stringify(told));
process.exit(0);
